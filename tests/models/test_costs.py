"""The cost model against a literal count of the matrix products that the graphs run."""

import pytest

from models.architecture import Architecture, ExitSpec, Head
from models.costs import attention_share, exit_costs, layer_cost


def build(*exits: tuple[int, Head], layers: int = 6, hidden: int = 384, embedding: int | None = None) -> Architecture:
    return Architecture(
        backbone="test",
        num_layers=layers,
        hidden_size=hidden,
        embedding_size=embedding or hidden,
        num_heads=12,
        intermediate_size=4 * hidden,
        vocab_size=100,
        max_length=512,
        layer_norm_eps=1e-12,
        num_labels=3,
        exits=tuple(ExitSpec(number=n, after_layer=layer, head=head) for n, (layer, head) in enumerate(exits, start=1)),
    )


def counted(architecture: Architecture, tokens: int) -> list[float]:
    """Multiply-accumulates until each exit, summed product by product in the order in which the graphs run them."""
    h, i, d = architecture.hidden_size, architecture.intermediate_size, architecture.head_size
    spent = 0

    def matmul(rows: int, inner: int, columns: int) -> None:
        nonlocal spent
        spent += rows * inner * columns

    def keys_and_values() -> None:
        for _ in ("key", "value"):
            matmul(tokens, h, h)

    def rest_of_layer(rows: int) -> None:
        matmul(rows, h, h)  # query
        for _ in range(architecture.num_heads):
            matmul(rows, d, tokens)  # scores
            matmul(rows, tokens, d)  # weighted values
        matmul(rows, h, h)  # output projection
        matmul(rows, h, i)
        matmul(rows, i, h)

    if architecture.embedding_size != h:
        matmul(tokens, architecture.embedding_size, h)
    totals, done, have_keys = [], 0, False
    for spec in architecture.exits:
        last = spec.number == len(architecture.exits)
        while done < spec.after_layer:
            if not have_keys:
                keys_and_values()
            have_keys = False
            only_one_row = last and spec.head == "cls" and done + 1 == spec.after_layer
            rest_of_layer(1 if only_one_row else tokens)
            done += 1
        if spec.head == "peek":
            keys_and_values()
            have_keys = True
            rest_of_layer(1)
        if spec.head == "attention":
            for _ in range(architecture.num_heads):
                matmul(1, d, tokens)
                matmul(1, tokens, d)
        matmul(1, h, h)  # dense
        matmul(1, h, architecture.num_labels)
        totals.append(float(spent))
    return totals


@pytest.mark.parametrize("tokens", [1, 2, 25, 128, 512])
@pytest.mark.parametrize(
    "architecture",
    [
        build((0, "peek"), (1, "peek"), (2, "peek"), (3, "peek"), (4, "peek"), (5, "peek")),
        build((1, "mean"), (2, "mean"), (3, "mean"), (6, "mean")),
        build((0, "attention"), (2, "attention"), (6, "attention")),
        build((1, "cls"), (3, "cls"), (6, "cls")),
        build((0, "peek"), (3, "mean"), (4, "peek"), (6, "cls")),
        build((5, "peek"), (6, "cls")),
        build((6, "cls")),
        build((2, "peek"), (5, "peek"), embedding=128),
    ],
    ids=lambda architecture: "-".join(f"{spec.head}{spec.after_layer}" for spec in architecture.exits),
)
def test_costs_are_the_counted_products_in_units_of_a_layer(architecture: Architecture, tokens: int) -> None:
    unit = layer_cost(architecture, tokens)
    assert exit_costs(architecture, tokens) * unit == pytest.approx(counted(architecture, tokens), rel=1e-12)


def test_a_layer_is_one_unit() -> None:
    h, i, s = 384, 1536, 25
    literal = 4 * s * h * h + 2 * s * h * i + 2 * s * s * h
    assert layer_cost(build((6, "mean")), s) == literal


def test_what_attention_alone_pads_costs_its_products_of_each_place() -> None:
    architecture, h, i, s = build((6, "mean")), 384, 1536, 128
    scores_and_values = 2 * s * h
    assert attention_share(architecture, s) == pytest.approx(scores_and_values / (layer_cost(architecture, s) / s))
    assert attention_share(architecture, s) == pytest.approx(2 * s * h / (4 * h * h + 2 * h * i + 2 * s * h))


@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_a_peek_after_layer_n_costs_about_n_and_a_sixth(tokens: int) -> None:
    base = build(*((n, "peek") for n in range(12)), layers=12, hidden=768)
    for n, cost in enumerate(exit_costs(base, tokens)):
        # Each exit passed leaves its own row behind, paid for all the same: about 1/tokens of a layer.
        assert cost == pytest.approx(n + 1 / 6, abs=0.03 + 2 * (n + 1) / tokens)


def test_going_on_after_a_peek_does_not_pay_its_keys_and_values_twice() -> None:
    peeked = exit_costs(build((2, "peek"), (6, "mean")), 128)
    straight = exit_costs(build((6, "mean")), 128)
    assert peeked[1] - straight[0] == pytest.approx(1 / 128, abs=0.005)


def test_deeper_exits_always_cost_more() -> None:
    costs = exit_costs(build((0, "peek"), (1, "cls"), (2, "peek"), (4, "attention"), (6, "mean")), 1)
    assert (costs[1:] > costs[:-1]).all()
