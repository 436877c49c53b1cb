"""The commands that make bundles; offramp.py shows them beside its own.

Only what option types need is imported up here: each command imports its side of the house inside its body, so that
`offramp --help` stays quick and works where torch is not installed.
"""

import typer

commands = typer.Typer()
