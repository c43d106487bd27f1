"""What is trained, drawn and evaluated: models/."""

STEP = "tests/models/test_step_by_hand.py"
STEPS, EVALUATION, MODE, OBJECTIVE, AVERAGE, SEED = (
    f"{STEP}::test_{name}"
    for name in (
        "steps",
        "evaluation",
        "an_evaluation_is_in_evaluation_mode",
        "the_objective_of_a_language_model",
        "the_average_starts_as_the_parameters",
        "what_a_run_draws_from_its_seed",
    )
)
LM, DIT = (
    f"{STEP}::test_the_averaged_{model}_is_evaluated_and_kept" for model in ("language_model", "diffusion_transformer")
)
FLOW = "tests/models/test_flow.py"
TRAINED_ON, DRAWN, HEUN, TRANSFORMER = (
    f"{FLOW}::test_{name}"
    for name in ("what_is_trained_on", "from_noise_to_image", "steps_are_heuns", "the_transformer")
)
DIGITS, PHOTOS = (
    "tests/models/test_images.py::test_digits_are_held_out_whole",
    "tests/models/test_images.py::test_photos_are_held_out_by_their_right_hand_fifth",
)
LIKELY, COMPARISON = (
    "tests/models/test_generate.py::test_draws_are_as_likely_as_the_temperature_says",
    "tests/models/test_precision.py::test_comparison",
)

# fmt: off
MUTATIONS = {
    "models step: every step has the same key": (
        "loop.py", "jax.random.split(jax.random.fold_in(key, state.step), schedule.accumulate)", "jax.random.split(key, schedule.accumulate)", STEPS),
    "models step: all micro-batches have the same key": (
        "loop.py", "keys = jax.random.split(jax.random.fold_in(key, state.step), schedule.accumulate)",
        "keys = jnp.stack([jax.random.fold_in(key, state.step)] * schedule.accumulate)", STEPS),
    "models step: micro-batches count alike": (
        "loop.py", "counted / jnp.maximum(tokens, 1), keys)", "jnp.ones_like(counted) / schedule.accumulate, keys)", STEPS),
    "models step: the gradient is of the measured loss": (
        "loop.py", "return loss, (measured, nnx.state(model, AmaxHistory))", "return measured.loss, (measured, nnx.state(model, AmaxHistory))", STEPS),
    "models schedule: the learning rate's decay is longer by the warm-up": (
        "loop.py", "schedule.warmup_steps, end, 0.05", "schedule.warmup_steps, end + schedule.warmup_steps, 0.05", STEPS),
    "models schedule: the learning rate ends at half its peak": (
        "loop.py", "0.05 * schedule.learning_rate)", "0.5 * schedule.learning_rate)", STEPS),
    "models schedule: the learning rate starts at its peak": (
        "loop.py", "warmup_cosine_decay_schedule(0.0,", "warmup_cosine_decay_schedule(schedule.learning_rate,", STEPS),
    "models optimizer: weight decay of another size": (
        "loop.py", "weight_decay=schedule.weight_decay, mask", "weight_decay=0.5 * schedule.weight_decay, mask", STEPS),
    "models optimizer: a longer memory of squares": (
        "loop.py", "b2=0.98", "b2=0.999", STEPS),
    "models optimizer: nothing is clipped": (
        "loop.py", "optax.chain(optax.clip_by_global_norm(schedule.clip_norm), adamw)", "adamw", STEPS),
    "models optimizer: updates are clipped": (
        "loop.py", "optax.chain(optax.clip_by_global_norm(schedule.clip_norm), adamw)", "optax.chain(adamw, optax.clip_by_global_norm(schedule.clip_norm))",
        STEPS),
    "models average: it is never as long as ema says": (
        "loop.py", "jnp.minimum(schedule.ema, (1 + state.step) / (10 + state.step))", "(1 + state.step) / (10 + state.step)", STEPS),
    "models average: of the parameters before the step": (
        "loop.py", "state.average, params)", "state.average, state.params)", STEPS),
    "models average: it starts at zero": (
        "loop.py", "jax.tree.map(jnp.copy, params)", "jax.tree.map(jnp.zeros_like, params)", AVERAGE),
    "models average: nobody uses it": (
        "loop.py", "return state.params if state.average is None else state.average", "return state.params", LM),
    "models average: the language model is evaluated without it": (
        "train_lm.py", "evaluate(loop.kept(state), state.histories", "evaluate(state.params, state.histories", LM),
    "models average: the language model is kept without it": (
        "train_lm.py", "collect((loop.kept(state), state.histories)", "collect((state.params, state.histories)", LM),
    "models average: the diffusion transformer is evaluated without it": (
        "train_dit.py", "evaluate(loop.kept(state), state.histories", "evaluate(state.params, state.histories", DIT),
    "models average: the diffusion transformer is kept without it": (
        "train_dit.py", "collect((loop.kept(state), state.histories)", "collect((state.params, state.histories)", DIT),
    "models metrics: the norm is of the updates": (
        "loop.py", "gradient_norm=optax.tree.norm(grads)", "gradient_norm=optax.tree.norm(updates)", STEPS),
    "models metrics: the next step's learning rate": (
        "loop.py", "jnp.asarray(learning_rate(state.step))", "jnp.asarray(learning_rate(state.step + 1))", STEPS),
    "models evaluation: micro-batches count alike": (
        "loop.py", "return jnp.sum(losses * counted) / jnp.maximum(jnp.sum(counted), 1)", "return jnp.mean(losses)", EVALUATION),
    "models evaluation: of what is made small": (
        "loop.py", "value(params, histories, *given)[1][0].loss", "value(params, histories, *given)[0]", EVALUATION),
    "models evaluation: all micro-batches have the same key": (
        "loop.py", "keys = jax.random.split(key, counted.shape[0])", "keys = jnp.stack([key] * counted.shape[0])", EVALUATION),
    "models evaluation: in training mode": (
        "loop.py", "if not training:", "if False:", MODE),
    "models evaluation: documents of a row see each other": (
        "train_lm.py", "functools.partial(objective, preset, True), mesh)", "functools.partial(objective, preset, preset.pack), mesh)", LM),
    "models evaluation: a language model's training documents": (
        "train_lm.py", "loop.place(heldout_batches(preset, corpus.heldout), mesh)", "loop.place(heldout_batches(preset, corpus.train), mesh)", LM),
    "models evaluation: a diffusion transformer's training images": (
        "train_dit.py", "every_image_once(data.heldout, *micro)", "every_image_once(data.train, *micro)", DIT),
    "models evaluation: labels are dropped": (
        "train_dit.py", "functools.partial(objective, label_dropout=0.0)", "functools.partial(objective, label_dropout=0.1)", DIT),
    "models evaluation: of the first rows": (
        "packing.py", "np.linspace(0, have - 1, min(count, have)).astype(np.int64)", "np.arange(min(count, have))",
        "tests/models/test_packing.py::test_an_evaluation_has_rows_from_everywhere"),
    "models data: a language model is trained on what is held out": (
        "train_lm.py", "make_batches(preset, corpus.train, rows)", "make_batches(preset, corpus.heldout, rows)", SEED),
    "models data: a diffusion transformer is trained on what is held out": (
        "train_dit.py", "image_batches(data.train,", "image_batches(data.heldout,", SEED),
    "models data: digits that are held out are trained on": (
        "images.py", "of_many_sizes(originals[~held], labels[~held], 12)", "of_many_sizes(originals, labels, 12)", DIGITS),
    "models data: a digit's variants have other digits' labels": (
        "images.py", "np.repeat(labels, variants)", "np.tile(labels, variants)", DIGITS),
    "models data: photos that are held out are trained on": (
        "images.py", "crops([photo[:, :cut] for", "crops([photo for", PHOTOS),
    "models seed: a language model's batches": (
        "train_lm.py", "preset.batch * preset.context, preset.accumulate, preset.seed)", "preset.batch * preset.context, preset.accumulate, 0)", SEED),
    "models seed: a language model's parameters": (
        "train_lm.py", "create = lambda: init_state(preset, preset.seed)", "create = lambda: init_state(preset, 0)", SEED),
    "models seed: a diffusion transformer's batches": (
        "train_dit.py", "micro_batches(preset, mesh), preset.seed)", "micro_batches(preset, mesh), 0)", SEED),
    "models seed: a diffusion transformer's noise": (
        "train_dit.py", "jax.random.split(jax.random.key(preset.seed))), mesh)", "jax.random.split(jax.random.key(0))), mesh)", SEED),
    "models objective: without the balancing loss": (
        "train_lm.py", "return loss + preset.balance_weight * balance, Measured", "return loss, Measured", OBJECTIVE),
    "models objective: the balancing loss is the layers' sum": (
        "train_lm.py", "jnp.mean(routed.aux_loss)", "jnp.sum(routed.aux_loss)", OBJECTIVE),
    "models objective: each expert's share of all layers": (
        "train_lm.py", "jnp.sum(routed.load, axis=1, keepdims=True)", "jnp.sum(routed.load)", OBJECTIVE),
    "models objective: padding counts in the mean": (
        "decoder.py", "/ jnp.maximum(batch.counted(), 1), routed", "/ batch.size, routed", OBJECTIVE),
    "models objective: padding is predicted": (
        "decoder.py", "jnp.where(batch.documents.ravel() >= 0, losses, 0.0)", "losses", OBJECTIVE),
    "models flow: the velocity's sign in the loss": (
        "dit.py", "(noise - batch.tokens)) ** 2", "(batch.tokens - noise)) ** 2", TRAINED_ON),
    "models flow: the velocity's sign in the sampler": (
        "dit.py", "return x + (there - here) * (first + second) / 2", "return x - (there - here) * (first + second) / 2", DRAWN),
    "models flow: time runs from noise to image": (
        "dit.py", "model((1 - at) * batch.tokens + at * noise,", "model(at * batch.tokens + (1 - at) * noise,", TRAINED_ON),
    "models flow: all images have the first one's time": (
        "dit.py", "at = time[sequence][:, None]", "at = time[0 * sequence][:, None]", TRAINED_ON),
    "models flow: times are uniform": (
        "dit.py", "jax.nn.sigmoid(jax.random.normal(time_key, (B,)))", "jax.random.uniform(time_key, (B,))", TRAINED_ON),
    "models flow: labels are dropped by the key of the times": (
        "dit.py", "jax.random.uniform(label_key, (B,))", "jax.random.uniform(time_key, (B,))", TRAINED_ON),
    "models flow: a dropped label is the first class": (
        "dit.py", "< label_dropout, model.config.classes, batch.labels)", "< label_dropout, 0, batch.labels)", TRAINED_ON),
    "models flow: no label is dropped in training": (
        "train_dit.py", "label_dropout: float = 0.1) -> tuple", "label_dropout: float = 0.0) -> tuple", DIT),
    "models flow: rows outside count in the mean": (
        "dit.py", "jnp.where(inside, error, 0)) / jnp.maximum(jnp.sum(inside), 1)", "jnp.where(inside, error, 0)) / T", TRAINED_ON),
    "models flow: drawn from image to noise": (
        "dit.py", "jnp.linspace(1.0, 0.0, steps + 1)", "jnp.linspace(0.0, 1.0, steps + 1)", DRAWN),
    "models flow: Euler's steps": (
        "dit.py", "(there - here) * (first + second) / 2", "(there - here) * first", HEUN),
    "models flow: the second velocity is where the first one was": (
        "dit.py", "second = velocity(x + (there - here) * first, there)", "second = velocity(x, there)", HEUN),
    "models flow: guidance squared": (
        "dit.py", "free + guidance * (guided - free)", "free + guidance**2 * (guided - free)", DRAWN),
    "models transformer: times between 0 and 1": (
        "dit.py", "waves(1000 * time, width, 60_000.0)", "waves(time, width, 60_000.0)", TRANSFORMER),
    "models transformer: labels are taken away": (
        "dit.py", "60_000.0)) + self.label(labels)", "60_000.0)) - self.label(labels)", TRANSFORMER),
    "models transformer: the lower edge is a row further": (
        "dit.py", "height - 1 - row, columns - 1 - column)", "height - row, columns - 1 - column)", TRANSFORMER),
    "models transformer: another activation": (
        "dit.py", "jax.checkpoint(jax.nn.gelu)", "jax.checkpoint(jax.nn.silu)", TRANSFORMER),
    "models experts: FP8's sum over devices is rounded before": (
        "decoder.py", "jaxops.combine(down, routing, out_dtype=jnp.float32)", "jaxops.combine(down, routing)",
        "tests/models/test_mesh.py::test_a_sum_over_devices_is_rounded_once"),
    "models generate: the temperature multiplies": (
        "generate.py", "logits / jnp.maximum(temperature, 1e-6)", "logits * jnp.maximum(temperature, 1e-6)", LIKELY),
    "models generate: all tokens are drawn with one key": (
        "generate.py", "keys = jax.random.split(key, length)", "keys = jnp.stack([key] * length)", LIKELY),
    "models comparison: the first losses": (
        "compare_precision.py", "of.losses[-last:]", "of.losses[:last]", COMPARISON),
    "models comparison: ratios of times the other way round": (
        "compare_precision.py", "round(float(np.percentile(baseline.us, 50)) / us[1], 3)", "round(us[1] / float(np.percentile(baseline.us, 50)), 3)",
        COMPARISON),
}
# fmt: on
