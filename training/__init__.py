"""Makes bundles."""

import os

# From 1.32 on, importing onnxruntime writes a device id into the home folder and reports to its vendor, unless told not
# to before its first import. Whoever wants that sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
