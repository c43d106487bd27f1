"""What a run writes and reads: checkpoints, models for transformers, data, and how it ends. models/."""

CHECKPOINTS, HF, ENDING, FAULTS = (f"tests/models/test_{name}.py" for name in ("checkpoints", "hf", "ending", "faults"))
BEFORE, BITS, STAY = (
    f"{CHECKPOINTS}::test_{name}"
    for name in ("a_damaged_one_is_named_and_the_one_before_is_taken", "every_bit_counts", "which_stay")
)
KEYS, VERIFIED = f"{HF}::test_each_key_left_out_and_odd_ones", f"{HF}::test_what_we_wrote_is_verified"
SIGNAL, ENDED = (
    f"{ENDING}::test_{name}"
    for name in ("a_signal_saves_first_and_the_run_goes_on_to_the_same_bits", "a_process_that_does_not_stop_is_ended")
)
DATA, LAUNCH = "tests/models/test_data.py::test_what_is_no_text", "tests/models/test_launch.py::test_other_data"

# fmt: off
MUTATIONS = {
    "files checkpoint: checksums are not compared": (
        "checkpoints.py", "if read[name] != sums[name]]", "if False]", f"{CHECKPOINTS}::test_one_number_is_another"),
    "files checkpoint: a checksum of the values alone": (
        "checkpoints.py", "x = words + place * jnp.uint32(0x9E3779B1)", "x = words", BITS),
    "files checkpoint: a checksum of the places alone": (
        "checkpoints.py", "x = words + place * jnp.uint32(0x9E3779B1)", "x = place * jnp.uint32(0x9E3779B1)", BITS),
    "files checkpoint: sixteen bits of each word": (
        "checkpoints.py", "x = words + place", "x = (words & 0xFFFF) + place", BITS),
    "files checkpoint: the oldest is read first": (
        "checkpoints.py", "for step in reversed(self.steps):", "for step in self.steps:", BEFORE),
    "files checkpoint: a damaged one stays": (
        "checkpoints.py", "folder.rename(aside)", "pass", BEFORE),
    "files checkpoint: metadata's own checksum is not compared": (
        "checkpoints.py", "if found.pop(OWN) != _crc(found):", "if found.pop(OWN) is None:", BEFORE),
    "files checkpoint: the best is forgotten by the next process": (
        "checkpoints.py", "metadata[HELDOUT] = heldout", "pass", STAY),
    "files checkpoint: the worst stays": (
        "checkpoints.py", "stay |= {min(losses", "stay |= {max(losses", STAY),
    "files hf: sums are not compared": (
        "whole_files.py", "elif _sum(file) != said[1]:", "elif False:", VERIFIED),
    "files hf: SHA256SUMS moves last": (
        "whole_files.py", "for file in (new / NAME, *files):", "for file in (*files, new / NAME):",
        f"{HF}::test_a_save_that_is_killed_leaves_the_files_before_or_what_is_refused"),
    "files hf: Mixtral's epsilon is Llama's": (
        "hf_config.py", "    rms_norm_eps: PositiveFloat = 1e-5\n", "", KEYS),
    "files hf: Mixtral's rope_theta is Llama's": (
        "hf_config.py", "    rope_theta: PositiveFloat = 1_000_000.0\n", "", KEYS),
    "files hf: rope_parameters go before rope_scaling": (
        "hf_config.py", "self.rope_scaling or self.rope_parameters", "self.rope_parameters or self.rope_scaling", KEYS),
    "files hf: a window on no layer is one": (
        "hf_config.py", "slides and self.max_window_layers < self.num_hidden_layers", "slides", KEYS),
    "files hf: Mixtral's window is read as Qwen3's": (
        "hf_config.py", '{"sliding window": self.sliding_window is not None}', '{"sliding window": False}', KEYS),
    "files hf: weights that are not finite": (
        "hf.py", "if not np.isfinite(tensor).all():", "if False:", f"{HF}::test_weights_that_are_not_read"),
    "files hf: a tied head that is another": (
        "hf.py", "if second_head is not None and not", "if second_head is not None and False and not",
        f"{HF}::test_what_transformers_reads_beside_the_parameters"),
    "files ending: a signal is not asked for": (
        "loop.py", "stop = signals.asked(done)", "stop = None", SIGNAL),
    "files ending: a signal does not save": (
        "loop.py", "or (stop is not None and run.save_every is not None)", "", SIGNAL),
    "files ending: the time after a signal is not bounded": (
        "ending.py", "select.select([self._pipe[0]], [], [], self._seconds)", "select.select([self._pipe[0]], [], [])", ENDED),
    "files ending: a full disk is any error": (
        "ending.py", "if not is_full(error):", "if False:", f"{ENDING}::test_other_errors_keep_their_traceback"),
    "files data: zero bytes are text": (
        "data.py", "if 0 in content:", "if False:", DATA),
    "files data: other data is taken": (
        "launch.py", "        check_data(sums, out / \"data.json\")\n", "", LAUNCH),
    "files config: its checksum is not compared": (
        "config.py", "if said.strip() != _crc(text):", "if False:", "tests/models/test_launch.py::test_a_damaged_config"),
}
# fmt: on
