"""Every op over groups of rows: all kinds of groups, at random too, and offsets that break the contract."""

import itertools

import jax
import numpy as np
import pytest

from tests.contracts.entry import Arguments, Dims, Op
from tests.contracts.run import EVERYTHING, cases, check_outside, compare, cotangents_of, parts, program, small

pytestmark = pytest.mark.versions
ROWS = 80


def has_groups(op: Op, way: str) -> bool:
    """FP8's are compared with numpy's, in their own tests."""
    return "group_offsets" in small(op) and op.reference is not None and not op.name.startswith("nn.")


CASES = cases(("xla", "interpret", "gpu"), where=has_groups)


def sizes_of(op: Op) -> Dims:
    """That no tile divides; one program of each op and way serves all tests."""
    return {size: 2 * n + 5 for size, n in op.sizes.items() if size != "G"} | {"M": ROWS}


def arguments_of(op: Op, offsets=None) -> Arguments:
    """offsets: instead of random ones."""
    made = small(op, **sizes_of(op))
    return made if offsets is None else made | {"group_offsets": np.asarray(offsets, np.int32)}


def scale_of(op: Op) -> float:
    """Of a unit two products, a product of both and another one: each adds its roundings."""
    return 2 if op.name == "grouped_glu" else 1


def groups_of(op: Op) -> int:
    return len(arguments_of(op)["group_offsets"]) - 1


def routings(op: Op) -> dict[str, np.ndarray]:
    """Offsets by what they are."""
    G = groups_of(op)
    found = {
        "whole tiles": np.minimum(3 + 16 * np.arange(G + 1), ROWS - 3),
        "no rows": np.full(G + 1, 30),
        "single rows at the end": ROWS - 1 - G + np.arange(G + 1),
        "one group": np.where(np.arange(G + 1) > 1, ROWS, 0),
        "first rows of the last group": np.where(np.arange(G + 1) == G, ROWS, 71),
    }
    for empty in itertools.product((False, True), repeat=G):
        sizes = np.where(empty, 0, (5 + 7 * np.arange(G)) % 17)
        found[f"empty {empty}"] = np.concatenate([[0], np.cumsum(sizes)])
    for seed in range(12):
        found[f"random {seed}"] = np.sort(np.random.default_rng(seed).integers(0, ROWS + 1, G + 1))
    return found


@pytest.mark.parametrize(("name", "way"), CASES)
def test_routings(name, way):
    """One program each."""
    op = EVERYTHING[name]
    for said, offsets in routings(op).items():
        try:
            compare(name, way, arguments_of(op, offsets), scale=scale_of(op))
        except AssertionError as error:
            error.add_note(f"{said}: {offsets.tolist()}")
            raise


@pytest.mark.parametrize(("name", "way"), CASES)
def test_offsets_that_break_the_contract(name, way):
    """Below 0, past the rows, decreasing: some result of the right shape, no access out of bounds (sanitize.py)."""
    op = EVERYTHING[name]
    (held, others), cotangents = parts(op, arguments_of(op)), cotangents_of(op, **sizes_of(op))
    right = program(name, way)(held, others, cotangents)
    for bad in ([-5, 10, 30, 40, 50], [0, 10, 30, 9, 10_000], [0, ROWS] * 3, [2**31 - 1, -(2**31), 0, 7, 9]):
        offsets = np.resize(np.array(bad, np.int32), groups_of(op) + 1)
        found = jax.block_until_ready(program(name, way)(held, others | {"group_offsets": offsets}, cotangents))
        assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, right)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_row_that_is_nan_stays_in_its_group(name, way):
    """Its neighbours are in the same tiles. Of several modalities it stays in its own one's columns, too. One is of the
    last group, and one of the second group in the cotangents."""
    op = EVERYTHING[name]
    arguments, G = arguments_of(op, np.linspace(5, ROWS - 3, groups_of(op) + 1).astype(int)), groups_of(op)
    row, other = arguments["group_offsets"][G - 1], arguments["group_offsets"][1]
    arguments[op.local[0]][row] = np.nan
    cotangents = [np.ones(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(op.call, arguments))]
    has_rows = cotangents[0].shape[0] == ROWS
    if has_rows:
        cotangents[0][other] = np.nan
    found = program(name, way)(*parts(op, arguments), cotangents)
    found = results, gradients = jax.tree.map(np.asarray, found)
    check_outside(op, arguments, *found, found)
    sums = {key: x for key, x in gradients.items() if key not in (*op.local, "accumulate_into", "bias", "biases")}
    matrices = []
    for x in jax.tree.leaves([results, sums, [x for key, x in gradients.items() if key in op.local]]):
        if x.shape[0] == ROWS:
            assert np.isfinite(np.delete(x, [row, other], axis=0)).all()
        else:
            matrices += [*x]
    broken = {number % G for number, matrix in enumerate(matrices) if np.isnan(matrix).any()}
    assert broken == ({1, G - 1} if has_rows else {G - 1})
