"""Offloading: the scan over layers, names, reports, proposals."""

SCAN, CHOICE, WHERE = (
    "tests/offload/test_scan.py",
    "tests/offload/test_scan.py::test_every_choice",
    "tests/offload/test_scan.py::test_where_residuals_lie",
)
CASTS = "tests/offload/test_scan.py::test_gradients_of_what_is_cast_once_are_stacked_in_the_narrower_type"

# fmt: off
MUTATIONS = {
    "offload index: a layer's residuals stand in its own place": (
        "offload/scanning.py", "i.astype(jnp.uint32) + 1", "i.astype(jnp.uint32)", CHOICE),
    "offload index: the same residuals come for every layer": (
        "offload/scanning.py", "return (i - 1, ct_carry, coming", "return (i, ct_carry, coming", CHOICE),
    "offload rows: an update that mixes them is streamed": (
        "offload/rowwise.py", "if not _keeps_rows(eqn, known):", "if not eqn:", "tests/offload/test_rowwise.py::test_refused"),
    "offload order: gradients are stacked before the next residuals have come": (
        "offload/scanning.py", "ct_x, coming = barrier((ct_x, coming))", "ct_x = barrier(ct_x)",
        f"{SCAN}::test_gradients_are_stacked_once_all_has_come"),
    "offload sum: the last layer's gradient of what stands around": (
        "offload/scanning.py", "[t + ct for t, ct in", "[0 * t + ct for t, ct in", f"{SCAN}::test_as_lax_scan"),
    "offload casts: of two casts' gradients one counts": (
        "offload/casts.py", "if len(users[var]) == 1 and", "if users[var] and", CASTS),
    "offload casts: gradients stay as wide as their parameters": (
        "offload/casts.py", "and after.itemsize < before.itemsize", "and after.itemsize > before.itemsize", CASTS),
    "offload: nothing goes to the host": (
        "offload/scanning.py", 'layer.policy.choice(name) == "offload")', 'layer.policy.choice(name) == "")', WHERE),
    "offload: what goes through a checkpoint is moved twice": (
        "offload/residuals.py", "var = eqn.invars[inner.invars.index(place)]", "return var, name",
        "tests/offload/test_residuals.py::test_what_goes_through_a_checkpoint_is_kept_once"),
    "offload: a result has no name": (
        "offload/residuals.py", "return jax.tree.map(lambda x: once[id(x)], (out, vjp))", "return out, jax.tree.map(lambda x: once[id(x)], vjp)",
        "tests/offload/test_residuals.py::test_everything_that_the_backward_needs"),
    "offload: a name that is kept and offloaded is kept": (
        "offload/policies.py", 'if covers(self.offload, name):', 'if covers(self.offload, name) and not covers(self.keep, name):',
        "tests/offload/test_policies.py::test_a_name_that_is_kept_and_offloaded"),
    "offload: an unknown name is taken": (
        "offload/scanning.py", "if unknown(names, seen):", "if not names:", "tests/offload/test_policies.py::test_a_name_that_no_value_has"),
    "offload: nothing of what is offloaded is kept on a device": (
        "offload/policies.py", "return Policy(self.keep + self.offload)", "return Policy(self.keep)", "tests/offload/test_policies.py"),
    "offload: a name stands for all that begin like it": (
        "offload/names.py", 'name.startswith(known + ".")', "name.startswith(known)", "tests/offload/test_policies.py"),
    "offload: a copy's beginning is forgotten": (
        "offload/reports.py", "(*_moved(opcode, result), len(work))", "(*_moved(opcode, result), 0)", "tests/offload/test_reports.py"),
    "offload: any copy is proposed": (
        "offload/proposals.py", "elif r.copy_us <= copying:", "elif r.copy_us <= copying or r:", "tests/offload/test_proposals.py"),
}
# fmt: on
