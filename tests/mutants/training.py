"""Faults in the training loop and what it stands on."""

from __future__ import annotations

from mutants.fault import Fault, group

STEP = "wiring/test_one_step"
KEYS = "wiring/test_keys_of_a_run"
LOOP = "training/test_loop"
WHERE = "training/test_where_noise_is_drawn"
OWN = "training/test_private_training"
SCRIPT_WORKERS = "training/test_workers_of_a_script"
SCORE = "training/test_private_score"

FAULTS: list[Fault] = [
    *group(
        "cluster/actor_pool.py",
        "cluster/test_pool::test_no_actor_is_blamed_for_a_pause_of_this_process",
        (
            "        if paused:  #",
            "        if False:  #",
            "all actors are killed after a laptop's sleep",
        ),
    ),
    *group(
        "cluster/executor.py",
        "cluster/test_executor",
        (
            "        alone = small and self._ray is None and not _has_gpus()\n",
            "        alone = self._ray is None and not _has_gpus()\n",
            "all work is done in one process",
        ),
        (
            "                    left.append(chunk)\n",
            "                    pass\n",
            "a chunk is lost between this process and Ray",
        ),
        (
            "                    signal.pthread_kill(working.ident or 0, signal.SIGINT)\n",
            "                    pass\n",
            "a training waits half an hour for an archive that is gone",
        ),
        (
            "            for check in self._checks:\n                self._ray.check_nodes(*check)\n",
            "",
            "hosts are not checked where a session opens late",
        ),
        (
            "            raise\n        if errors:\n            raise errors[0]\n        poll()\n",
            "            raise\n        poll()\n",
            "errors of the archive are dropped in one process",
        ),
        (
            "        self._whole.check_nodes(packages, shared_folder)\n",
            "        pass\n",
            "hosts are not checked where small work opens the session",
        ),
        (
            "        waiting, end = in_order(chunks),",
            "        waiting, end = iter(chunks),",
            "small work leaves the order of chunks",
        ),
        (
            "        last = max(n for n,",
            "        last = min(n for n,",
            "an inner block closes the outer one",
        ),
        (
            "        return self._whole.place(small)\n",
            "        return self\n",
            "large sets of teachers are trained in one process",
        ),
    ),
    *group(
        "cluster/executor.py",
        "cluster/test_executor",
        (
            "        after.callback(torch.set_num_threads, torch.get_num_threads())\n",
            "",
            "what comes after a job has one thread",
        ),
        (
            "        after.callback(_set_backends, torch.get_float32_matmul_precision(), given)\n",
            "",
            "what work sets in torch's libraries stays set behind it",
        ),
        (
            "        after.callback(DETERMINISTIC.choose, deterministic)\n",
            "",
            "deterministic kernels stay switched on behind a job",
        ),
        (
            "    if precision is not None:\n        _set_precision(precision)\n",
            "",
            "a precision of products stays set behind a job",
        ),
        (
            "        _set_backends(None, new)  #",
            "        #",
            "libraries of precisions of their own end a job with torch's error",
        ),
        (
            "            after.enter_context(torch.autocast(device, enabled=False))\n",
            "            pass\n",
            "a notebook's autocast reaches what runs in its process",
        ),
    ),
    *group(
        "dpdist/core/torch_settings.py",
        "cluster/test_executor",
        (
            "                self._open -= 1\n                if not self._open:\n",
            "                self._open -= 1\n                if True:\n",
            "one of two threads takes the other's number format away",
        ),
    ),
    *group(
        "dpdist/training/trainer.py",
        "cluster/test_executor",
        (
            "            require_current_code(job.recipe, folder.path)\n",
            "            pass\n",
            "code that was edited since its import is executed",
        ),
        (
            "resources.max_workers == 1 and not resources.gpus_per_worker",
            "resources.max_workers == 1",
            "a training that asks for GPUs runs on the CPU",
        ),
        (
            "                raise UserError(str(error)) from error\n",
            "                raise\n",
            "a damaged ledger ends in a traceback",
        ),
        (
            "        except (UserError, ClusterError):\n            raise\n        except Exception",
            "        except Exception",
            "a training that diverged is restarted",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "cluster/test_executor::test_a_training_in_this_process_has_the_threads_of_its_recipe",
        (
            "    if place.in_process:\n        torch.set_num_threads(max(1, int(job.recipe.resources.cpus_per_worker)))\n",
            "    if place.in_process:\n",
            "a training in one process has the machine's threads",
        ),
    ),
    *group(
        "dpdist/evaluation.py",
        "training/test_targets",
        (
            "errors.square().sum(), second + errors.abs().sum()",
            "errors.abs().sum(), second + errors.square().sum()",
            "squared and absolute errors change places",
        ),
        (
            "second + right.all(1).sum()",
            "second + right.any(1).sum()",
            "one right label is all of them",
        ),
    ),
    *group(
        "dpdist/data/parquet.py",
        "training/test_targets",
        (
            "if (lengths != count).any() or values.null_count:",
            "if len(values) != len(lengths) * count:",
            "numbers of one record are another one's",
        ),
        ("(found == 0) | (found == 1)", "found >= 0", "any number is a label"),
    ),
    *group(
        "dpdist/config/sections.py",
        f"{OWN}::test_it_is_dp_sgd_worked_out_by_hand {OWN}::test_an_automatic_clip_has_no_other_rule",
        (
            'return {**values, "clipping": "automatic", "clip_norm": 1.0}',
            'return {**values, "clip_norm": 1.0}',
            "an automatic clip is a flat one",
        ),
        (
            'if (rule := values.get("clipping", "automatic")) != "automatic":',
            'if (rule := values.get("clipping", "automatic")) == "none":',
            "an automatic clip beside another rule is believed",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        "wiring/test_one_step::test_every_optimizer",
        (
            "flat.mul_(1 - rate * self.training.weight_decay)",
            "flat.mul_(1 - self.training.weight_decay / 100)",
            "AdamW's decay does not follow the learning rate",
        ),
    ),
    *group(
        "dpdist/training/model_setup.py",
        "wiring/test_one_step::test_every_loss",
        (
            "        engine.objective = objective(recipe.training)\n",
            '        engine.objective = objective_of("mse")\n',
            "another loss is learned than the recipe says",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_targets",
        (
            "recipe.model.name, recipe.method.name, recipe.training.loss",
            "recipe.model.name, recipe.method.name",
            "steps go on under the code of another loss",
        ),
    ),
    *group(
        "dpdist/training/job.py",
        "training/test_damaged_runs",
        (
            "needed = [folder.plan, folder.data_fingerprint, folder.run_key, folder.start_record]",
            "needed = [folder.plan, folder.data_fingerprint, folder.start_record]",
            "a lost run key is made afresh",
        ),
        ("if keys - {key", "if False and keys - {key", "any run key goes on"),
    ),
    *group(
        "dpdist/training/checkpoint.py",
        "training/test_damaged_runs",
        (
            "about.get(_DIGEST_KEY) != tensors_digest(tensors)",
            "False",
            "a checkpoint's bits are believed",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_damaged_runs",
        ("if _has_taken_steps(job.folder):", "if False:", "lost noise is fixed again"),
        ("if before not in (None, digest):", "if False:", "fixed noise may change under way"),
    ),
    *group(
        "dpdist/evaluation.py",
        "training/test_damaged_runs",
        (
            "models.model_hash(folder.model_folder) != own",
            "False",
            "any model is used as the run's",
        ),
    ),
    *group(
        "dpdist/runs/folder.py",
        "training/test_damaged_runs",
        (
            ", folder.training_summary, folder.worker_groups)",
            ", folder.training_summary)",
            "a run without ledger begins anew",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        f"{STEP}::test_every_optimizer",
        (
            "noisy = add_noise(summed, noise_key, noise_std, start, summed)",
            "noisy = (add_noise(summed, noise_key, noise_std, start), summed)[1]",
            "the unnoised sum updates the model while noise is drawn",
        ),
        (
            "step_plan.expected_batch)), seen",
            "max(1, seen.examples))), seen",
            "the sum is divided by the realised batch",
        ),
        (
            "self.release(step, rows, step_plan.noise_std, ",
            "self.release(step, rows, step_plan.noise_std / 2, ",
            "half the noise",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        f"{STEP}::test_every_optimizer",
        (
            "self.flat[self.own] = self.optimizer.published_parameters(self.flat[self.own])",
            "self.optimizer.published_parameters(self.flat[self.own])",
            "the average is computed and not published",
        ),
        (
            "            for name, slot in self._slots.items():\n"
            "                found = state.slots[name]  # whole, where another kind of release kept it\n"
            "                slot.copy_(found if found.shape == slot.shape else found[self.own])\n",
            "",
            "a restart forgets momentum, Adam's state and the average",
        ),
        ("start = state.step\n", "start = state.step - 1\n", "a restart repeats a step"),
        (
            "            self.flat.copy_(state.parameters)\n",
            "",
            "a restart begins from the first parameters",
        ),
        (
            "range(self.start, self.last)",
            "range(self.start, self.last - (self.last == plan.steps))",
            "one step fewer",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        f"{STEP}::test_every_clip_and_noise",
        (
            "self.release(step, rows, step_plan.noise_std, ",
            "self.release(step, rows, step_plan.noise_multiplier, ",
            "the noise forgets the clip norm",
        ),
        (
            "batch_cap=step_plan.batch_cap, ",
            "batch_cap=None, ",
            "the cap on the batch is not executed",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        f"{STEP}::test_several_phases_each_with_its_own_rate_and_noise",
        (
            "step_plan = plan.step(number)\n",
            "step_plan = plan.step(0)\n",
            "every step executes the first phase",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        f"{STEP}::test_an_empty_batch_is_a_step_like_any_other",
        (
            "        self.optimizer.update(self.flat[self.own], noisy, number)\n",
            "        if seen.examples == 0:\n            return\n        self.optimizer.update(self.flat[self.own], noisy, number)\n",
            "an empty batch is skipped",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        f"{STEP}::test_every_method",
        (
            "        step.sharing.broadcast_updates(reducer, self.flat)\n        self.constrain()\n",
            "        step.sharing.broadcast_updates(reducer, self.flat)\n",
            "the first layer's norm is not kept after an update",
        ),
        (
            "constrain = execution.project_parameters(model)\n    constrain()\n",
            "constrain = execution.project_parameters(model)\n",
            "the first layer's norm is not kept before the first step",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        f"{STEP}::test_every_method",
        (
            "draw_key=draw_key, record_ids=ids, out",
            "draw_key=draw_key, record_ids=ids - ids[0], out",
            "perturbations are keyed by the place in the batch",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "wiring/test_one_step::test_one_run_equals_the_same_run_in_pieces",
        (
            'if number == self.start or recipe.training.schedule != "constant":',
            "if number == self.start:",
            "the smoothing noise ignores the schedule",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        KEYS,
        (
            'derive_key(self.key, "noise", self.attempt_of(step), step)',
            'derive_key(self.key, "sample", self.attempt_of(step), step)',
            "the noise key is the sampling key",
        ),
        (
            'derive_key(self.key, "noise", self.attempt_of(step), step)',
            'derive_key(self.key, "noise", self.attempt_of(step))',
            "the same noise at every step",
        ),
        (
            'derive_key(self.key, "noise", self.attempt_of(step), step)',
            'derive_key(self.key, "noise", step)',
            "the same noise in every attempt",
        ),
        (
            'derive_key(self.key, "sample", self.attempt_of(step), step)',
            'derive_key(self.key, "sample", step)',
            "the sampling key without the attempt",
        ),
        (
            'derive_key(self.key, "sample", self.attempt_of(step), step)',
            'derive_key(self.key, "sample", self.attempt_of(step))',
            "the same batch at every step",
        ),
        (
            'derive_key(self.key, "draw", self.attempt_of(step), step)',
            'derive_key(self.key, "draw", self.attempt_of(step))',
            "the draw key without the step",
        ),
        (
            'derive_key(self.key, "draw", self.attempt_of(step), step)',
            "sample_key",
            "perturbations are keyed as the sampling is",
        ),
        (
            "                _announce(self.ledger, step, found)\n",
            '                add_noise(summed, derive_key(self.key, "noise", self.attempt_of(step), step), noise_std, 0)\n'
            "                _announce(self.ledger, step, found)\n",
            "noise is drawn before the ledger knows",
        ),
        (
            "                _announce(self.ledger, step, found)\n",
            "                pass\n",
            "releases are not put on record",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        KEYS,
        (
            '"run", plan.fingerprint(), records.fingerprint, "trial", 0',
            '"run", records.fingerprint, "trial", 0',
            "keys do not depend on the plan",
        ),
        (
            '"run", plan.fingerprint(), records.fingerprint, "trial", 0',
            '"run", plan.fingerprint(), "trial", 0',
            "keys do not depend on the data",
        ),
        ('run_key, "run"', 'bytes(32), "run"', "keys do not depend on the run key"),
        (
            "{nonce if job.recipe.privacy.run_key is None else ''}",
            "",
            "a secret attempt has no nonce",
        ),
        ('derive_key(key, "hidden")', "key", "the one hidden noise is keyed by the run's key"),
    ),
    *group(
        "dpdist/training/private_step.py",
        f"{LOOP}::test_another_number_of_workers_is_a_new_attempt_and_is_charged "
        f"{LOOP}::test_same_noise_is_never_added_to_another_sum "
        f"{LOOP}::test_workers_that_drift_apart_are_noticed",
        ("ledger.new_epoch(", "str(", "a replay that differs takes no new epoch"),
    ),
    *group(
        "dpdist/training/worker.py",
        f"{LOOP}::test_another_number_of_workers_is_a_new_attempt_and_is_charged "
        f"{LOOP}::test_same_noise_is_never_added_to_another_sum "
        f"{LOOP}::test_workers_that_drift_apart_are_noticed",
        (
            "raise MissingRank(f\"the workers' parameters differ",
            "str(f\"the workers' parameters differ",
            "workers that drift apart go on",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        f"{KEYS}::test_no_step_is_released_without_the_archive_s_leave "
        f"{KEYS}::test_a_clip_that_exceeds_the_plan_s_is_not_executed",
        (
            "engine.clipping.sensitivity * (1 + sharing.reduce_dtype.clip_reduction) > clip_norm * (\n"
            "        1 + 1e-9\n"
            "    )",
            "False",
            "a clip above the plan's is accepted",
        ),
        ("self.permit(step)", "pass", "the archive is not asked before a release"),
    ),
    *group(
        "dpdist/training/worker.py",
        f"{LOOP}::test_another_number_of_workers_is_a_new_attempt_and_is_charged {WHERE}",
        (
            '"world_size": "any" if job.recipe.training.reproducible else str(reducer.world_size)',
            '"world_size": "any"',
            "another number of workers replays with the same keys",
        ),
        (
            '**({"noise": "device"} if resources.noise == "device" else {}),',
            "",
            "noise of another place replays with the same keys",
        ),
        (
            'resources.noise == "device" and len(kinds := set(reducer.all_gather_text(kind))) > 1',
            "False",
            "devices of two kinds share a release",
        ),
    ),
    *group(
        "dpdist/audits/mechanism.py",
        WHERE,
        (
            'target.recipe.resources.noise == "device"',
            "False",
            "a device's noise is not what is audited",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        WHERE,
        (
            "noise.add_device_noise(total, noise_key, noise_std, start)",
            "noise.add_device_noise(total, noise_key, noise_std)",
            "all shards share a device's noise",
        ),
        (
            "noise.add_device_noise(total, noise_key, noise_std, start)",
            'noise.add_device_noise(total, derive_key(self.key, "noise"), noise_std, start)',
            "all steps share a device's noise",
        ),
        (
            "noise.add_device_noise(total, noise_key, noise_std, start), flagged",
            "total, flagged",
            "a device releases the sum",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        WHERE,
        (
            "        check_device_noise(reducer.device)\n",
            "        pass\n",
            "a device that computes otherwise makes noise",
        ),
        (
            'recipe.resources.noise == "device"',
            "False",
            "the recipe's place of the noise is not taken",
        ),
    ),
    *group(
        "dpdist/privacy/ledger.py",
        "training/test_elastic",
        ("if done >= step}", "if done > step}", "a step that is charged again is not said"),
        (
            "len(later - self.released_steps(self._epoch))",
            "len(later)",
            "an exact replay is said to be charged",
        ),
        (
            "or identity not in (None, self._identity):",
            "or False:",
            "a change of workers is taken for an exact replay, under a ceiling",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_elastic",
        (
            "        _check_ceiling(job, ledger, newest, mine)\n",
            "",
            "steps are charged again beyond a ceiling",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_finite",
        (
            '            reducer.all_gather_text("")  # nobody says so before worker 0 has the step on its ledger\n',
            "",
            "a worker says that a training diverged before the ledger has the step",
        ),
    ),
    *group(
        "dpdist/training/monitoring.py",
        "training/test_elastic",
        (
            "if group.workers == before.workers and not group.again and not group.saved:",
            "if group.workers == before.workers and not group.saved:",
            "a charge without another number of workers is not said",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_interruption",
        (
            "        self.save(done)\n        if self.monitor is not None:\n            self.monitor.pause(done)",
            "        if self.monitor is not None:\n            self.monitor.pause(done)",
            "workers that a host leaves end without a checkpoint",
        ),
        (
            "flag = reducer.rank == 0 and (due or (watch is not None and watch.is_due()))",
            "flag = reducer.rank == 0 and due",
            "Ray is asked for a pre-emption at checkpoints alone",
        ),
        (
            "reducer.any_flag(reducer.rank == 0 and flag)",
            "reducer.any_flag(due)",
            "a method with steps of its own asks at its checkpoints alone",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_a_checkpoint_keeps_no_change_that_is_not_on_record",
        (
            '            self._look_between(self._done, "checkpoint")\n            self._save()\n',
            "            self._save()\n",
            "a checkpoint that a script asks for hides what it changed",
        ),
    ),
    *group(
        "dpdist/training/monitoring.py",
        "training/test_interruption",
        (
            "return bool(told & 1), told >= 2 or host_leaves",
            "return bool(told & 1), host_leaves",
            "the workers do not hear of SIGTERM",
        ),
        (
            "return bool(told & 1), told >= 2 or host_leaves",
            "return bool(told & 1), told >= 2",
            "the workers do not hear that a host goes",
        ),
    ),
    *group(
        "dpdist/training/trainer.py",
        "training/test_interruption",
        (
            "for _ in range(MAX_PREEMPTIONS + 1):",
            "while True:",
            "workers are started again after any number of pre-emptions",
        ),
    ),
    *group(
        "dpdist/config/sections.py",
        "training/test_elastic",
        (
            "if charged and self.privacy.budget_ceiling is not None:",
            "if False:",
            "a ceiling is taken where every host that comes or goes is charged",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        f"{KEYS}::test_no_step_is_released_without_the_archive_s_leave",
        (
            "while step >= self._granted:",
            "while step > self._granted:",
            "one step more than the archive has given leave for",
        ),
        (
            'folder.archive.exists() and read_json(folder.archive, {"private": bool})["private"]',
            "False",
            "no run asks its archive",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        f"{LOOP}::test_a_missing_rank_never_updates_the_model {STEP}::test_several_workers training/test_reducer",
        (
            "if present != self.world_size:",
            "if present > self.world_size:",
            "a missing worker is a smaller sum",
        ),
        ("result += row", "result = row", "only the last row counts"),
        ("return bool((low == high).all())", "return True", "different digests are the same"),
        ("flags > 0", "flags > 1", "a flag of one worker is not seen"),
        (
            "self._exchange(dist.broadcast, tensor, src=source)",
            "dist.broadcast(tensor, src=1)",
            "worker 0's number is another's",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_private_step",
        (
            "            elif self._released.setdefault(label, found) != found:\n",
            "            elif False:\n",
            "without a ledger a step's noise is added to two sums",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_workers_of_a_script::test_a_groups_threads_end_with_it",
        (
            "            function.__defaults__ = tuple(",
            "            _ = tuple(",
            "the threads of a destroyed process group live on",
        ),
        (
            "        let_go_of_the_group()\n        device",
            "        device",
            "a script's process group lives on in torch's defaults",
        ),
    ),
    *group(
        "dpdist/data/protocol.py",
        "data/test_protocol",
        (
            "    for number, generator in enumerate(own):\n",
            "    for number, generator in ():\n",
            "a data set's own generator goes on from record to record",
        ),
        (
            "        for each, state in others:\n",
            "        for each, state in ():\n",
            "a data set's own generator is left as the last record had it",
        ),
        (
            "        yield value.__self__\n",
            "        pass\n",
            "a generator behind a method of its own is not found",
        ),
        (
            'yield object.__getattribute__(value, "__dict__")',
            'yield getattr(value, "__dict__", None)',
            "the search for generators runs code of what it looks at",
        ),
        (
            "yield slot.__get__(value)",
            "pass",
            "a generator in a slot is not found",
        ),
        (
            "value.__kwdefaults__, value.__dict__)",
            "value.__kwdefaults__)",
            "a generator that is a function's attribute is not found",
        ),
        (
            "                yield cell.cell_contents\n",
            "                pass\n",
            "a generator in a closure is not found",
        ),
    ),
    *group(
        "dpdist/data/adapters.py",
        "data/test_protocol",
        (
            "        records._generators = self._find_generators()  #",
            "        #",
            "a generator that the first item makes is not seeded",
        ),
    ),
    *group(
        "dpdist/training/private_score.py",
        "training/test_private_score",
        (
            "                    seed_generators(seed_of(key, row), generators)  #",
            "                    pass  #",
            "one record's draws give all other scores other numbers",
        ),
    ),
    *group(
        "dpdist/training/rendezvous.py",
        "training/test_workers_of_a_script::test_a_groups_threads_end_with_it",
        (
            "        let_go_of_the_group()\n",
            "",
            "a recipe's process group lives on in torch's defaults",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_sharding training/test_reducer",
        (
            "            total += row\n",
            "            total = row\n",
            "only the last worker's shard counts",
        ),
        (
            "flagged = reducer.any_flag(flag)",
            "flagged = flag",
            "a worker that takes no part is not noticed",
        ),
        (
            "reducer.broadcast(flat[part], rank)",
            "reducer.broadcast(flat[part], 0)",
            "a shard stays as it was on the others",
        ),
        (
            "_parts(size, reducer.world_size)[reducer.rank]",
            "_parts(size, reducer.world_size)[0]",
            "every worker has the first shard",
        ),
        (
            "        digest.update(np.ascontiguousarray(summed[at : at + LEAF]).data)\n",
            "",
            "a release id does not cover the sum",
        ),
        (
            "range(0, len(summed), LEAF)",
            "range(0, min(LEAF, len(summed)), LEAF)",
            "a release id covers the first leaf alone",
        ),
        (
            "        checkpoint.save_part(",
            "        len(slots) or checkpoint.save_part(",
            "momentum is in no checkpoint",
        ),
        (
            "min(p.start + low, p.stop), min(p.start + low + step, p.stop)",
            "min(p.start, p.stop), min(p.start + step, p.stop)",
            "the first piece of a part travels again and again",
        ),
        (
            "total[low : low + step] = found",
            "total[: len(found)] = found",
            "pieces land on the first one's place",
        ),
        (
            "first = shards.local_shards[0][0] if shards.local_shards else 0",
            "first = 0",
            "every worker sends the first one's rows",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_release_in_place",
        (
            "self._buffer.zero_()[:-2]",
            "self._buffer[:-2]",
            "a step's sums are added to what the last one released",
        ),
        ("if rows is self._rows:", "if True:", "the sums of others are taken for the step's"),
        ("if rows is self._rows:", "if False:", "every step makes its sums anew"),
        ("            buffer[-2:] = tail\n", "", "nobody is counted"),
    ),
    *group(
        "dpdist/gradients/noise.py",
        "training/test_release_in_place",
        (
            "        normals += summed[part]\n",
            "        normals += summed[part]\n        if place == 0:\n            noisy[part] = normals\n            continue\n",
            "the first piece is not rounded",
        ),
        (
            "        normals += summed[part]\n",
            "        normals += summed[part]\n        if place:\n            continue\n",
            "all pieces but the first are released without noise",
        ),
        (
            "        normals += summed[part]\n",
            "        normals += summed[part] + (normals if place else 0)\n",
            "pieces get their noise twice",
        ),
        (
            "reader = WordReader(key, 2 * first,",
            "reader = WordReader(key, first,",
            "the stream is entered at the wrong word",
        ),
    ),
    *group(
        "dpdist/gradients/noise.py",
        "gradients/test_keys",
        (
            "yield low - start, entries[low - 2 * begin : high - 2 * begin]",
            "yield low - start, entries[: high - low]",
            "a shard's pieces begin at a pair's first entry",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_release_in_place",
        ("noisy.div_(", "noisy.div(", "a step's division makes a vector"),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_release_in_place",
        (
            "gradient[leaf].to(flat)",
            "gradient[: leaf.stop - start].to(flat)",
            "all leaves are moved by the first one's gradient",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_release_in_place",
        ("flat.aminmax()", "(flat.amin(), flat.amin())", "parameters that are infinite go on"),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_wire",
        (
            "_FLOAT32_ROUNDING = 2.0**-23",
            "_FLOAT32_ROUNDING = 2.0**-25",
            "room for the rounding of half a sum",
        ),
        (
            "return _FLOAT32_ROUNDING * (self.max_records + 1) if",
            "return _FLOAT32_ROUNDING if",
            "the room forgets how many records there are",
        ),
        (
            "if records > self.max_records:",
            "if False:",
            "a sum of more records than there is room for is sent",
        ),
        (
            "mean + math.sqrt(2 * _LOG_FAILURE_BOUND * mean) + _LOG_FAILURE_BOUND * 2 / 3",
            "mean + 3 * math.sqrt(mean)",
            "more records than there is room for come once in a thousand steps",
        ),
        ("most if cap is None else min(most, cap)", "most", "a cap is forgotten"),
        (
            "if self.clip_reduction <= MAX_CLIP_REDUCTION:",
            "if True:",
            "any batch is taken, at any price",
        ),
    ),
    *group(
        "dpdist/training/model_setup.py",
        "training/test_wire",
        (
            "recipe.privacy.clip_norm / (1 + build_reduce_dtype(recipe, plan).clip_reduction)",
            "recipe.privacy.clip_norm",
            "the clip makes no room",
        ),
        (
            "else recipe.resources.min_workers",
            "else recipe.resources.most",
            "room for the share of the most workers, not of the fewest",
        ),
        (
            "expected = plan.max_expected_batch",
            "expected = plan.step(0).expected_batch",
            "room for the batches of the first phase alone",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_wire",
        (
            "total = stack[0].to(rows.dtype)",
            "total = stack[0].clone()",
            "sums that arrived are added up in float32",
        ),
        (
            'f"{self.reduce_dtype.name}, {self.reduce_dtype.max_records:g}"',
            "self.reduce_dtype.name",
            "another room replays with the same keys",
        ),
        (
            "wire | ({} if ordered",
            "(wire if ordered else {}) | ({} if ordered",
            "three workers change the wire within an attempt",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_wire",
        (
            "engine.clipping.sensitivity * (1 + sharing.reduce_dtype.clip_reduction) >",
            "engine.clipping.sensitivity >",
            "a clip without room for the rounding is accepted",
        ),
        (
            "            self.sharing.reduce_dtype.check(len(members))\n",
            "",
            "nobody counts the records of a sum",
        ),
        (
            "self.sharing.reduce_dtype.check(len(members))",
            "row or self.sharing.reduce_dtype.check(len(members))",
            "of canonical shards only the first is counted",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_sharding",
        (
            "self.sharing.local_slice(self.reducer, size).start",
            "0",
            "every shard gets the noise of the first",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_sharding",
        (
            "        self.optimizer.update(self.flat[self.own], noisy, number)\n",
            "        for _ in range(1 + (self.own.start > 0)):\n            self.optimizer.update(self.flat[self.own], noisy, number)\n",
            "a shard is updated twice",
        ),
        (
            "else found[self.own])",
            "else found[: len(slot)])",
            "a shard goes on with another's momentum",
        ),
    ),
    *group(
        "dpdist/training/checkpoint.py",
        "training/test_sharding",
        (
            "        start += length\n    if start != size:",
            "    if start + len(found) < 0:",
            "every part is read as the first",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        f"{STEP}::test_every_optimizer",
        ("flat.add_(gradient, alpha=-rate)", "flat.add_(gradient, alpha=rate)", "gradient ascent"),
        (
            "flat.add_(momentum, alpha=-rate)",
            "flat.add_(gradient, alpha=-rate)",
            "momentum is kept and not used",
        ),
        (
            ".mul_(self.training.momentum).add_(gradient)",
            ".mul_(self.training.momentum).add_(gradient, alpha=1 - self.training.momentum)",
            "momentum is damped",
        ),
        ("mean.mul_(_ADAM_BETA1)", "mean.mul_(_ADAM_BETA2)", "Adam's first decay is its second"),
        (
            "addcmul_(gradient, gradient, value=1 - _ADAM_BETA2)",
            "add_(gradient, alpha=1 - _ADAM_BETA2)",
            "Adam's square is no square",
        ),
        (
            "rate / (1 - _ADAM_BETA1 ** (step + 1))",
            "rate / (1 - _ADAM_BETA1 ** (step + 2))",
            "Adam's bias correction is off by one",
        ),
        ("(square / (1 - _ADAM_BETA2 ** (step + 1)))", "square", "Adam's square is not corrected"),
        (".lerp_(flat, 1 - decay)", ".lerp_(flat, decay)", "the average is the wrong way round"),
        (
            "min(self.training.ema, (step + 1) / (step + 10))",
            "self.training.ema",
            "the average has no warm-up",
        ),
        (
            "done = step / self.steps",
            "done = (step + 1) / self.steps",
            "the schedule is a step ahead",
        ),
        ('"linear": 1 - done', '"linear": 1 + done', "the linear schedule rises"),
        (
            "(1 + math.cos(math.pi * done)) / 2",
            "(1 + math.cos(math.pi * done))",
            "the cosine schedule is twice as high",
        ),
        (
            "gradient = gradient.add(flat, alpha=self.training.weight_decay)",
            "flat.mul_(1 - rate * self.training.weight_decay)",
            "the weight decay is not in the momentum",
        ),
        ("done >= passed for", "done > passed for", "the rate falls a step late"),
        ('return self.slots.get("ema", flat)', "return flat", "the average is not published"),
        (
            'self.slots["ema"] = flat.clone()',
            'self.slots["ema"] = torch.zeros_like(flat)',
            "the average begins at zero",
        ),
    ),
    *group(
        "dpdist/training/model_setup.py",
        "test_dry_run",
        ("held = sum(p.nbytes for p in frozen)", "held = 0", "a frozen base takes no memory"),
        (
            "sum(p.numel() for p in every) + largest",
            "engine.size + largest",
            "a frozen base is not copied for the check",
        ),
    ),
    *group(
        "dpdist/training/checkpoint.py",
        "training/test_checkpoint",
        (
            'complete[-1] / "state.safetensors"',
            'complete[0] / "state.safetensors"',
            "an older state under the newest step",
        ),
        ("(part * (2 * weights + 1)).sum()", "part.sum()", "the digest ignores the order"),
        (
            '{f"slot.{k}": v.cpu() for k, v in state.slots.items()}',
            "{}",
            "optimizer state is not saved",
        ),
        (
            "    make_private_folder(folder)\n    target",
            "    folder.mkdir(parents=True, exist_ok=True)\n    target",
            "others can read checkpoints",
        ),
        (
            "raise OSError(code, os.strerror(code)) from error",
            "raise",
            "a full disk is a traceback",
        ),
    ),
    *group(
        "dpdist/training/job.py",
        f"training/test_checkpoint {KEYS}",
        (
            "run_key, fixed or (key or new_run_key()).hex())",
            'run_key, fixed or "00" * 32)',
            "every run has the same key",
        ),
        ("    if fixed and not", "    if False and not", "a fixed key is not marked"),
    ),
    *group(
        "dpdist/core/files.py",
        "training/test_checkpoint training/test_damaged_runs",
        ("os.O_EXCL, 0o600)", "os.O_EXCL, 0o644)", "others can read the run key"),
        ("            os.fsync(file.fileno())\n", "", "the run key is not synced"),
    ),
    *group(
        "dpdist/runs/folder.py",
        "training/test_released",
        (
            "complete = ledger.release_counts.keys() >= set(range(made.steps))",
            "complete = True",
            "steps that a model was made of may be missing",
        ),
        (
            "complete_checkpoints(folder.checkpoints)[-1:]",
            "complete_checkpoints(folder.checkpoints)[:1]",
            "a ledger is held against the oldest checkpoint",
        ),
        (
            "max(ledger.release_counts, default=-1) >= plan.steps",
            "max(ledger.release_counts, default=-1) > plan.steps",
            "a ledger may have one step more than its plan",
        ),
        ("not ledger.contains_anchor(made.anchor)", "False", "superseded releases may be cut off"),
        (
            "if ledger.plan_fingerprint != plan.fingerprint():",
            "if False:",
            "a ledger of another plan is taken",
        ),
        ("if made.steps > plan.steps:", "if False:", "a model of any number of steps is looked up"),
        (
            "if steps != plan.steps:",
            "if False:",
            "a finished training has fewer steps than its plan",
        ),
    ),
    *group(
        "dpdist/training/provenance.py",
        "training/test_checkpoint::test_records_of_a_pretrained_part_are_not_unpickled "
        "cluster/test_storage",
        ("allow_pickle=False", "allow_pickle=True", "records of a pretrained part are unpickled"),
    ),
    *group(
        "dpdist/training/provenance.py",
        "training/test_denoiser_before_weights",
        (
            "return spec if before is None else dataclasses.replace(spec, denoiser=before)",
            "return spec",
            "the denoiser that weights stand behind is left out",
        ),
        (
            "if not recipe.method.capabilities.supports_frozen_denoiser:",
            "if False:",
            "noise is put into a frozen denoiser",
        ),
        (
            '    _check_part(spec, recipe, dataset, f"{begin}: its denoiser")\n',
            "",
            "a stranger's denoiser is built",
        ),
        (
            '    if spec.has_noise:\n        raise UserError(f"{begin}: its',
            '    if False:\n        raise UserError(f"{begin}: its',
            "a denoiser with noise of its own is frozen",
        ),
    ),
    *group(
        "dpdist/config/sections.py",
        "training/test_denoiser_before_weights training/test_denoised_smoothing",
        (
            "if denoiser is not None and not self.method.capabilities.supports_frozen_denoiser:",
            "if False:",
            "any method goes behind a denoiser",
        ),
    ),
    *group(
        "dpdist/methods/functional.py",
        "training/test_denoiser_before_weights",
        (
            "supports_frozen_denoiser=not self.encoder,",
            "supports_frozen_denoiser=True,",
            "filters are learned from what no network sees",
        ),
    ),
    *group(
        "dpdist/models/outputs.py",
        "training/test_denoiser_before_weights",
        ("x = network.get_submodule(DENOISER)(x)", "pass", "an average leaves the denoiser out"),
        ("if self._denoised:", "if hasattr(network, DENOISER):", "parts are told by their names"),
    ),
    *group(
        "dpdist/training/model_setup.py",
        "training/test_denoiser_before_weights",
        (
            "denoised = whole.averages_views and whole.denoiser is not None",
            "denoised = False",
            "the image is moved",
        ),
        (
            "denoised = whole.averages_views and",
            "denoised = whole.shifts > 0 and",
            "the image is mirrored",
        ),
    ),
    *group(
        "dpdist/training/pretraining.py",
        "training/test_denoiser_before_weights",
        ("first.requires_grad_(False)", "pass", "the denoiser goes on learning"),
        (
            "training.train_public(first, public, test.input_shape, section, models.DENOISER, progress)",
            "pass",
            "the denoiser stays as it began",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        KEYS,
        (
            "read_run_key(job.folder) if fixed else new_run_key()",
            "read_run_key(job.folder)",
            "a repeated paid sum gets the same noise",
        ),
    ),
    *group(
        "dpdist/methods/hidden_noise_shares.py",
        KEYS,
        (
            'sample_key = derive_key(key, "sample")',
            "sample_key = key",
            "a paid sum is sampled by the key that its noise comes from",
        ),
    ),
    *group(
        "dpdist/core/files.py",
        "cluster/test_storage",
        ("            fsync_path(aside)\n", "            pass\n", "no fsync of the bytes"),
        ("            fsync_path(path.parent)\n", "            pass\n", "no fsync of the name"),
        (
            "data: bytes | str, *, durable: bool = True",
            "data: bytes | str, *, durable: bool = False",
            "files do not wait for the disk",
        ),
        ("    path.chmod(0o700)\n", "", "private folders are open to all"),
    ),
    *group(
        "dpdist/training/ensembles.py",
        "methods/test_answers_on_record",
        (
            "                verify_ledger(self._folder, self._plan, ledger)\n",
            "",
            "answers are given on a ledger that lost what was given",
        ),
        (
            'new_run_key(), "answer", number)',
            'new_run_key(), "answer")',
            "under a fixed key all answers share their noise",
        ),
    ),
    *group(
        "dpdist/training/job.py",
        "training/test_charging",
        (
            "    delta = privacy.budget_delta or privacy.delta\n",
            "    delta = privacy.delta\n",
            "a ceiling counts at the run's delta",
        ),
        (
            "np.asarray(records.hashes),",
            "np.asarray(records.hashes)[:1],",
            "only the first record is on the budget",
        ),
        (
            "            budget.settle(recipe.privacy.budget, *made)\n\n",
            "\n",
            "a run whose reservation was lost stays reserved",
        ),
    ),
    *group(
        "dpdist/runs/recipe.py",
        "training/test_charging",
        (
            "        privacy.neighbours,\n        privacy.nominal",
            '        "add-or-remove-one" if privacy.batch_cap else privacy.neighbours,\n        privacy.nominal',
            "replace-one with a cap is planned as add-or-remove",
        ),
    ),
    *group(
        "dpdist/training/checkpoint.py",
        "training/test_alike",
        (
            "int(read_json(complete[-1] /",
            "int(read_json(complete[0] /",
            "the newest step is the oldest one's",
        ),
        (
            "low = min(max(entries.start - start, 0), length)",
            "low = 0",
            "a part's share begins at its first entry",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_alike",
        (
            "for name in sorted(state.tensors):",
            "for name in sorted(state.tensors)[:1]:",
            "only the first fixed tensor may not change",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        "training/test_alike",
        (
            "self._epoch, self._total = folder, epoch or 0, total",
            "self._epoch, self._total = folder, 0, total",
            "leave of the first epoch counts for all",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_alike",
        (
            "return total.add_(0.0) if world > 1 and shards.num_rows > 1 else total",
            "return total",
            "negative zeros differ between kinds of release",
        ),
        (
            'hashlib.blake2b(label.encode(), digest_size=32, person=b"dpdist.release")',
            'hashlib.blake2b(b"", digest_size=32, person=b"dpdist.release")',
            "a release id does not say whose sum it is",
        ),
    ),
    *group(
        "dpdist/training/ensembles.py",
        "training/test_alike",
        (
            'derive_key(self._shared.key, "teacher", number)',
            'derive_key(self._shared.key, "teacher")',
            "all teachers share a key",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_alike",
        (
            "largest = -(-planned // count)",
            "largest = -(-records // count)",
            "a block's size follows the true number of records where it was declared",
        ),
    ),
    *group(
        "dpdist/training/provenance.py",
        "test_conversion",
        (
            'if re.search(rf"(?<!\\w){re.escape(own.casefold())}(?!\\w)", saw.casefold()):',
            "if saw == own:",
            "another spelling hides that a network of features saw the records",
        ),
        (
            'if written["files"].get(str(file.relative_to(folder))) != file_digest(file):',
            "if False:",
            "other features are believed to be those of the network",
        ),
        (
            "if recipe.privacy.budget is not None and data.holds_features(section.root, section.name):",
            "if False:",
            "features of the same pictures by another network are charged apart",
        ),
        (
            "if recipe.model.pretrained_part is not None:\n        raise",
            "if False:\n        raise",
            "a run on features begins with a model that learned the same pictures",
        ),
    ),
    *group(
        "dpdist/conversion.py",
        "test_conversion",
        (
            '(inputs, "draws random numbers"), (others, "mixes records of a batch")',
            '(inputs, "draws random numbers"), (inputs, "mixes records of a batch")',
            "features that depend on other records are taken",
        ),
        (
            '"test" if _is_tested(name, test_fraction) else "train"',
            '"test" if len(splits["train"]) > 4 else "train"',
            "a patient's split depends on the others",
        ),
    ),
    *group(
        "dpdist/training/provenance.py",
        "training/test_provenance",
        (
            'if card["extra"].get("model hash") != model:',
            "if False:",
            "a card of another model is believed",
        ),
        (
            "            return False  # other records lie there now",
            "            return True",
            "other records at the old place count as compared",
        ),
        (
            "theirs = private_records(other, source)",
            "theirs = records_with_canaries(other, source)",
            "records that chose a model's settings, but not trained it, are not compared",
        ),
        (
            'if len(hashes) != written["records"]:',
            "if False:",
            "a shortened list of seen records is believed",
        ),
        (
            "name.casefold() == private.casefold():",
            "name == recipe.data.name:",
            "another spelling of the data's name hides what a release was trained on",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_it_is_dp_sgd_worked_out_by_hand {OWN}::test_only_the_gradient_that_was_released_is_read",
        (
            "parameter.grad = piece.view(parameter.shape).to(parameter)",
            "parameter.grad = piece.view(parameter.shape).to(parameter).mul_(1.01)",
            "the optimizer gets another gradient than the released one",
        ),
        (
            "        self.optimizer.step()\n        for parameter in self._engine.parameters:\n            parameter.grad = None\n",
            "        self.optimizer.step()\n",
            "gradients stay there for the script",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_a_change_between_steps_is_on_the_card {OWN}::test_the_optimizer_is_watched_too {OWN}::test_a_registered_scheduler_is_no_change",
        (
            "                self._step.ledger.note_changes(changed)\n",
            "                pass\n",
            "a script's own changes are not seen",
        ),
    ),
    *group(
        "dpdist/training/script_state.py",
        f"{OWN}::test_a_registered_scheduler_is_no_change {OWN}::test_a_rate_set_by_hand_is_a_change_beside_a_scheduler {OWN}::test_a_rate_that_follows_losses_is_on_the_card",
        (
            'new["lr"] not in [float(r[place]) for r in rates]',
            "not rates",
            "a rate set by hand passes for the scheduler's",
        ),
        ('if cycles else {"lr"}', "", "momentum may be changed by hand beside any scheduler"),
        (
            "if schedulers and not any(isinstance(each, ReduceLROnPlateau) for each in schedulers):",
            "if schedulers:",
            "a rate that follows losses passes for a fixed one",
        ),
    ),
    *group(
        "dpdist/privacy/ledger.py",
        f"{OWN}::test_a_change_between_steps_is_on_the_card privacy/test_ledger",
        (
            "return replace(found, kind=POST_PROCESSED) if self._changes else found",
            "return found",
            "a changed model is called proved",
        ),
        (
            '            self._append({"kind": "changed", "parts": new})\n',
            "            self._changes.update(new)\n",
            "a script's change is not on record",
        ),
    ),
    *group(
        "dpdist/training/script_state.py",
        f"{OWN}::test_a_forward_pass_keeps_nothing_in_the_model",
        (
            "owner.clear()  # of those that the pass registered, too",
            "pass",
            "a buffer that a pass registers is kept",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_another_forward_pass_than_the_checked_one_is_refused {OWN}::test_a_forward_pass_keeps_nothing_in_the_model {OWN}::test_units_are_equal_by_value",
        ("if now == self._form:", "if True:", "what mixes records comes in after the checks"),
        (
            "    unit = unit.item() if isinstance(unit, Tensor | np.generic) and unit.ndim == 0 else unit\n",
            "",
            "a person's records are as many persons",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        "training/test_workers_of_a_script::test_other_errors_of_a_collective_stay_what_they_are",
        (
            "            if not _GONE.search(str(error)):\n",
            "            if False:\n",
            "every error of a collective is called a lost worker",
        ),
        (
            "            _show_in_one_line(WorkerLost)\n",
            "",
            "a lost worker is told by a traceback",
        ),
    ),
    *group(
        "dpdist/training/script_state.py",
        f"{OWN}::test_a_change_after_steps_that_saw_none_is_noticed {OWN}::test_a_changed_class_or_a_hook_of_all_modules_is_noticed "
        f"{OWN}::test_what_was_put_back_is_no_change",
        (
            "                and all(map(operator.is_, held.values(), values))\n",
            "",
            "an exchanged layer or attribute is not seen from the second step on",
        ),
        (
            "all(map(operator.is_, held.values(), values))",
            "tuple(held.values()) == values",
            "True in place of 1 is not seen from the second step on",
        ),
        (
            "all(_type_of(each) == before for each, before in self._types)",
            "True",
            "a parameter of another type is not seen from the second step on",
        ),
        (
            "return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad",
            "return tensor.shape, tensor.dtype, tensor.device",
            "a frozen parameter is not seen from the second step on",
        ),
        (
            "            and not any(self._empty)\n",
            "",
            "a first hook is not seen from the second step on",
        ),
        (
            "                kind.forward is forward and kind.__call__ is call\n",
            "                kind.__call__ is call\n",
            "another forward of a class is not seen from the second step on",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_a_run_of_before_goes_on_without_its_settings "
        f"{OWN}::test_another_setting_on_a_run_that_began_is_refused",
        (
            "        refuse_differences(setting_differences(before, now), self.run.path)\n",
            "",
            "a script's other settings are ignored in silence",
        ),
        (
            '        self._given = begun.get("given")\n',
            "",
            "a script's settings are those of the last start, not of the first",
        ),
        (
            "        olds.setdefault(_argument(key), old)\n",
            "        olds[_argument(key)] = old\n",
            "another loss of a script is told by its default",
        ),
    ),
    *group(
        "dpdist/training/script_state.py",
        f"{OWN}::test_another_setting_on_a_run_that_began_is_refused "
        f"{OWN}::test_a_notebook_s_objects_go_on_after_their_steps "
        f"{OWN}::test_weights_without_a_seed_are_those_of_the_run",
        (
            '"trained" if parameter.requires_grad else "frozen"',
            '"trained"',
            "other trained parameters of a script are not compared",
        ),
        (
            '        if getattr(each, "last_epoch", 0) > 0:',
            "        if False:",
            "the rate of a scheduler's steps is taken for a script's other setting",
        ),
        (
            " if seed < _MOST_CHOSEN else {}",
            "",
            "a script without a seed is refused for the seed of its process",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_a_run_over_the_budget_is_refused_before_a_step "
        f"{OWN}::test_records_of_every_kind_are_known_to_a_budget "
        f"{OWN}::test_a_second_start_may_take_the_room_first "
        f"{OWN}::test_a_run_that_was_cut_stays_charged_and_goes_on",
        (
            "            check_charge(recipe, plan, self._hashed, _CONTEXT)\n",
            "            pass\n",
            "a script's run over the budget is begun",
        ),
        (
            "                self._charge_budget()\n",
            "",
            "a script's run is charged to no budget",
        ),
        (
            "        self._stack.callback(end_charge, recipe, folder, self._hashed, mine, _CONTEXT)\n",
            "",
            "a script's run is never settled",
        ),
        (
            "type(records).input_macs is not Records.input_macs:",
            "False:",
            "a budget knows random draws of records in place of the records",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_scores_and_a_budget_do_not_go_together",
        (
            "        if self._hashed is not None:\n            raise UserError(\n",
            "        if False:\n            raise UserError(\n",
            "a budget is charged for none of a script's scores",
        ),
    ),
    *group(
        "dpdist/gradients/objective.py",
        f"{OWN}::test_refusals_are_one_line_and_leave_nothing",
        (
            "    except Exception as error:  # whatever a user's function does\n",
            "    except ArithmeticError as error:\n",
            "a script's loss of outputs and targets is told by torch's error",
        ),
    ),
    *group(
        "dpdist/training/script_state.py",
        f"{OWN}::test_a_factory_of_another_module_is_refused",
        (
            "        if before.get(name) != now.get(name):",
            "        if False:",
            "a release's factory may build other layers",
        ),
        (
            "    if changed := sorted(",
            "    if changed := [] and sorted(",
            "a release's factory may have classes of other code",
        ),
        (
            "_CLOSE = 1e-4",
            "_CLOSE = 1e4",
            "a release's factory may answer otherwise",
        ),
        (
            "if isinstance(value, property) else (value,)",
            "if False else (value,)",
            "a release's factory may have other properties",
        ),
    ),
    *group(
        "dpdist/publishing.py",
        f"{OWN}::test_a_factory_is_for_runs_that_need_one "
        f"{OWN}::test_a_factory_may_be_named_for_the_release",
        (
            "    if facts.tables:\n",
            "    if False:\n",
            "certificates are of a release's other factory",
        ),
        (
            '"model hash": made}',
            "}",
            "the card of a release by a factory names another model",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_parameters_that_are_not_finite_are_seen",
        (
            "return total - total == 0 or bool(values.isfinite().all())",
            "return total - total == 0",
            "a sum that overflows ends a training",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_a_class_without_an_output_is_refused_at_the_start",
        (
            "        check_targets(records, loss, classes)\n",
            "        pass\n",
            "a label is told by an error",
        ),
    ),
    *group(
        "dpdist/training/script_state.py",
        f"{OWN}::test_the_optimizer_is_watched_too",
        (
            "        if not self._scheduled(state):",
            "        if False:",
            "a changed learning rate is not seen",
        ),
        ("            if not same:\n", "            if False:\n", "changed tensors are not seen"),
        (
            "(self._kept.keys() | self._numbers.keys()) - seen",
            "set()",
            "a cleared state is not seen",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_refusals_are_one_line_and_leave_nothing {OWN}::test_a_scheduler_that_is_not_registered_is_refused "
        f"{OWN}::test_other_parameters_in_mid_run_are_refused {OWN}::test_held_out_records_must_not_be_private "
        f"{OWN}::test_units_of_several_records_need_their_size",
        (
            "            _check_schedulers(self.optimizer, self.state)\n",
            "",
            "a scheduler that nobody keeps goes on",
        ),
        (
            "if (now := self._trained()) != self._trained_names:",
            "if (now := self._trained()) is None:",
            "parameters are frozen in mid-run",
        ),
        ("    if drew:\n", "    if False:\n", "dropout is trained with"),
        ("    if common:\n", "    if False:\n", "private records are published as held out"),
        ("    if largest > size:\n", "    if False:\n", "a unit has more records than its size"),
        (
            "closure.default is inspect.Parameter.empty:",
            "closure.default is None:",
            "LBFGS is taken",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_a_step_that_was_interrupted_is_not_gone_on_with {OWN}::test_a_replay_with_another_sum_never_gets_the_announced_noise "
        f"{OWN}::test_changed_code_of_the_script_begins_a_new_attempt {OWN}::test_the_fingerprint_is_keyed "
        f"{OWN}::test_a_step_tells_released_values_alone",
        (
            "        except ReplayConflict:\n            key",
            "        except ZeroDivisionError:\n            key",
            "a replay that differs ends the script",
        ),
        (
            '        if self._inside:\n            raise UserError(\n                "step: ',
            '        if False:\n            raise UserError(\n                "step: ',
            "a broken step is gone on with",
        ),
        (
            '            self.optimizer.load_state_dict(unpack("optimizer", state.slots))\n',
            "",
            "a restart forgets the optimizer's state",
        ),
        (
            '            "script": self._code(),\n',
            "",
            "a script's code does not count",
        ),
        (
            "derive_key(run_key, _FINGERPRINT)",
            "bytes(32)",
            "the fingerprint of a script's records has no key",
        ),
        (
            "asdict(seen) if self._private_metrics else None",
            "asdict(seen)",
            "a step tells of private records",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_private_step",
        (
            'derive_key(self.key, "data", self.attempt_of(step), step)',
            'derive_key(self.key, "data", self.attempt_of(step))',
            "all steps see one draw of the transforms",
        ),
        (
            'derive_key(self.key, "data", self.attempt_of(step), step)',
            'derive_key(self.key, "data", step)',
            "all attempts see one draw of the transforms",
        ),
        (
            "            if self.ledger is not None:\n                self.permit(step)",
            "            if False:\n                self.permit(step)",
            "a step without a recipe is not put on record",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        f"{SCRIPT_WORKERS}::test_two_workers_are_one {SCRIPT_WORKERS}::test_no_worker_has_a_gradient_that_is_not_on_record",
        (
            'noise_key = derive_key(self.key, "noise", self.attempt_of(step), step)',
            'noise_key = derive_key(self.key, "noise", self.attempt_of(step), step, self.reducer.rank)',
            "every worker of a script adds noise of its own",
        ),
        (
            "        self.announcing(announce)\n",
            "        announce()\n",
            "a worker draws the noise of a step that is on no record",
        ),
        (
            "        return Shards(1, largest, [(0, *bounds(reducer.rank))], [1] * reducer.world_size)\n",
            "        return Shards(1, largest, [(0, 0, bounds(reducer.rank)[1])], [1] * reducer.world_size)\n",
            "shards of a script's workers overlap",
        ),
    ),
    *group(
        "dpdist/data/protocol.py",
        SCORE,
        (
            "units = [math.floor(bounded(value) * UNITS) for value in values]",
            "units = [math.floor(value * UNITS) for value in values]",
            "a record's value has no bound",
        ),
        (
            "return 0.0 if math.isnan(value) else min(max(value, 0.0), 1.0)",
            "return 0.0 if math.isnan(value) else min(value, 1.0)",
            "a record's value may be negative",
        ),
    ),
    *group(
        "dpdist/training/private_score.py",
        SCORE,
        (
            "        except Exception:\n            return 0.0\n",
            "        except Exception:\n            raise\n",
            "a record on which the value fails ends the run",
        ),
        (
            "with torch.no_grad(), kept_buffers(model):",
            "with torch.no_grad():",
            "a record leaves something in buffers to the next one",
        ),
        (
            "made_of = checkpoint.tensors_digest(model.state_dict())",
            "made_of = str(self._units(model, step, workers))",
            "equal sums of other models get the same answer",
        ),
        (
            "labels = [total.hex(), *([] if nonce is None else [nonce])]",
            "labels = [] if nonce is None else [nonce]",
            "another sum of the same model gets the same noise",
        ),
        (
            "            except QueriesExhausted:\n                return _Found()\n            nonce",
            "            except QueriesExhausted:\n                pass\n            nonce",
            "more scores are given than the plan pays for",
        ),
        (
            "                ledger.record_query(query, plan)\n",
            "                pass\n",
            "scores are on no ledger",
        ),
        (
            "        noisy = add_noise(np.array([total]), key, self.terms.noise)\n",
            "        noisy = np.array([total])\n",
            "a score has no noise",
        ),
        (
            "add_noise(np.array([total]), key, self.terms.noise)",
            "add_noise(np.array([total]), key, self.terms.noise / 2)",
            "a score has half its noise",
        ),
        (
            'derive_key(self._key, "noise", query, *labels)',
            'derive_key(self._key, "noise", *labels[1:])',
            "all scores get one noise",
        ),
        (
            "                ledger.record_answer(query, [score])\n",
            "",
            "a score that was given is drawn again",
        ),
    ),
    *group(
        "dpdist/training/private_score.py",
        f"{SCORE}::test_refusals_are_one_line_and_leave_nothing",
        (
            "if given is not None and (common := count_common(held_out, given)):",
            "if given is not None and (common := 0):",
            "a record is trained on and scored on",
        ),
        (
            'if recipe.privacy.neighbours != "add-or-remove-one":',
            "if False:",
            "scores beside replace-one are begun",
        ),
        ("    if plan.nominal:\n", "    if False:\n", "a declared number of records is given away"),
        (
            "if not torch.equal(drawn, torch.get_rng_state()):",
            "if False:",
            "a value may draw random numbers",
        ),
    ),
    *group(
        "dpdist/training/private_score.py",
        f"{SCORE}::test_a_run_goes_on_with_the_scores_it_was_begun_with",
        (
            'if read_json(path, {"held out": str})["held out"] != told:',
            "if False:",
            "a run goes on with other held-out records",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{SCRIPT_WORKERS}::test_two_workers_are_one {SCRIPT_WORKERS}::test_workers_that_drift_apart_are_refused "
        f"{SCRIPT_WORKERS}::test_what_one_worker_refuses_all_refuse {SCRIPT_WORKERS}::test_another_number_of_workers_goes_on",
        (
            "            if self._workers.first:\n                self._charge_budget()\n",
            "            if True:\n                self._charge_budget()\n",
            "every worker of a script writes the ledger",
        ),
        (
            '        self._workers.check_same({"data": told.fingerprint})\n',
            "",
            "workers of a script train on different records",
        ),
        (
            '        self._workers.check_same({**told, **self._digests("model")})\n',
            "",
            "workers of a script begin with different models",
        ),
        (
            "            self._workers.check_same(parts)\n",
            "            pass\n",
            "what one worker changes is not on the others",
        ),
        (
            "plan.records, reducer, self._recipe.training.reproducible",
            "plan.records, reducer, False",
            "a reproducible script adds up by the number of its workers",
        ),
    ),
    *group(
        "dpdist/training/collectives.py",
        f"{SCRIPT_WORKERS}::test_no_worker_has_a_gradient_that_is_not_on_record "
        f"{SCRIPT_WORKERS}::test_other_errors_tell_the_others_no_value",
        (
            "            if verdict != _ON_RECORD:\n",
            "            if False:\n",
            "workers go on without the ledger",
        ),
        (
            'said = str(error) if users else f"failed with {type(error).__name__}"',
            "said = str(error)",
            "an error brings a record's value to other workers",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{SCRIPT_WORKERS}::test_workers_that_score_otherwise_are_refused",
        (
            "        scored.check_same(self._workers, code_digest_of(self.model, value))\n",
            "",
            "workers score different records, or in another way",
        ),
    ),
    *group(
        "dpdist/training/private_score.py",
        f"{SCRIPT_WORKERS}::test_two_workers_score_as_one_to_the_bit "
        f"{SCRIPT_WORKERS}::test_workers_whose_models_drift_apart_are_not_scored",
        (
            "range(worker, len(seen), workers)",
            "range(len(seen))",
            "each worker adds up all held-out records",
        ),
        (
            'sum(each["units"] for each in shares)',
            'shares[0]["units"]',
            "the first worker's records alone are scored",
        ),
        (
            "            return self._told(score, workers)",
            "            return score",
            "workers beside the first have no score",
        ),
        (
            "        elif workers.first:\n",
            "        else:\n",
            "every worker writes down what is scored",
        ),
        (
            '            workers.check_same({"parameters": made_of})\n',
            "",
            "a score is of several models at once",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_what_was_checked_holds_before_the_first_step_too",
        (
            "        self._modes = {name: module.training for name, module in self.model.named_modules()}\n",
            "        self._modes = {}\n",
            "the mode may change between the checks and the first step",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{SCORE}::test_a_run_goes_on_with_the_scores_it_was_begun_with {SCORE}::test_too_little_noise_is_refused_with_the_noise_that_fits {SCORE}::test_refusals_are_one_line_and_leave_nothing",
        (
            "if (begun := self._recipe.score) is not None and self._scored is None:",
            "if (begun := self._recipe.score) is not None and False:",
            "a run goes on without the scores that it pays for",
        ),
        (
            "        _check_groups(recipe, records, held_out)\n",
            "        _check_groups(recipe, records)\n",
            "a person may be trained on and scored on",
        ),
        (
            "self._planned(with_score(self._recipe, terms, value is not None))",
            "pass",
            "scores are declared and not planned",
        ),
    ),
    *group(
        "dpdist/runs/recipe.py",
        f"{SCORE}::test_the_steps_get_the_noise_that_they_get_without_scores {SCORE}::test_too_little_noise_is_refused_with_the_noise_that_fits",
        (
            "return _plan_without_scores(recipe, records, noise)\n",
            "return plan_with_noise(recipe, records, noise)\n",
            "steps get more noise because of scores",
        ),
        (
            "    _check_score_noise(recipe, plan, context)\n",
            "",
            "scores may cost more than epsilon",
        ),
    ),
    *group(
        "dpdist/privacy/phases.py",
        "privacy/test_phases::test_scores_beside_a_training_are_charged_from_the_beginning",
        (
            "        if not taken:\n            return scores\n",
            "        if not taken:\n            return ()\n",
            "scores cost nothing before the first step",
        ),
        (
            "return ((ScoredTraining if whole else ParallelParts)((tuple(taken), scores)),)",
            "return tuple(taken)",
            "scores cost nothing beside steps",
        ),
    ),
    *group(
        "dpdist/data/adapters.py",
        f"{SCORE}::test_records_under_random_transforms_are_known_by_what_they_are",
        (
            "yield (*macs, mac_of(key, named))",
            "yield macs",
            "records under random transforms are never the same",
        ),
    ),
    *group(
        "dpdist/training/estimate.py",
        "training/test_estimate",
        (
            "inputs, targets = records.examples(PROBE_EXAMPLES)",
            "inputs, targets = records.batch(slice(0, 64)), records.targets(slice(0, 64))",
            "time is measured on private records",
        ),
        (
            "slots, objective = _slots(optimizer),",
            "slots, objective = 0,",
            "optimizers keep nothing",
        ),
        ("extra_bytes(engine) + rows * each", "extra_bytes(engine)", "memory has no activations"),
        (
            "executed / rate + _noise_seconds(engine.size, step.noise_std)",
            "executed / rate",
            "noise takes no time",
        ),
        (
            "return executed / rate +",
            "return step.expected_batch / rate +",
            "rows that fill passes up take no time",
        ),
    ),
    # --- rates by class
    *group(
        "dpdist/privacy/phases.py",
        "privacy/test_rates_by_class::test_the_price_is_that_of_the_largest_rate",
        (
            "one = _sampled(dpa.GaussianDpEvent(self.noise_multiplier), self.sample_rate)",
            "one = _sampled(dpa.GaussianDpEvent(self.noise_multiplier), self.mean_rate)",
            "a step is priced at the mean rate of the classes",
        ),
    ),
    *group(
        "dpdist/gradients/sampling.py",
        "training/test_class_rates::test_another_record_s_class_moves_nobody_else",
        (
            "kept[own] = _joins(draws[joined[own]], rate)",
            "kept[own] = _joins(draws[joined[own]], min(1.0, rate * len(own) / (1 + own.sum())))",
            "rates follow from how many private records a class has",
        ),
    ),
    *group(
        "dpdist/training/model_setup.py",
        "training/test_class_rates::test_weights_stand_before_the_clip_so_that_no_record_adds_more",
        (
            "    engine.objective = importance_weighted(engine.objective, recipe, records)\n",
            "    if plan and (rates := plan.step(0).class_rates) and recipe.data.importance_weights:\n"
            "        own, by_class = engine.clipped_sum, rates.importance_weights\n"
            "        engine.clipped_sum = lambda inputs, targets, **more: dataclasses.replace(\n"
            "            found := own(inputs, targets, **more), flat=found.flat * by_class[targets[0]]\n"
            "        )\n",
            "a weight multiplies a gradient after its clip",
        ),
    ),
    *group(
        "dpdist/gradients/hooks.py",
        "training/test_class_rates::test_a_weight_makes_no_losses_of_what_is_none",
        (
            "or losses.shape != targets.shape:",
            "or losses.dim() > 1:",
            "a mean over the batch becomes a loss a record by its weight",
        ),
    ),
    *group(
        "dpdist/gradients/hooks.py",
        "training/test_class_rates::test_targets_of_any_kind_choose_their_own_weights",
        (
            "by_class[targets.long()]",
            "by_class[targets]",
            "targets of bools are a mask, by which records weigh each other",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_class_rates::"
        "test_the_sum_is_divided_by_the_public_batch_and_never_by_the_drawn_one",
        (
            "return noisy.div_(noisy.new_full((1,), step_plan.expected_batch)), seen, flagged",
            "return noisy.div_(noisy.new_full((1,), max(1, seen.examples))), seen, flagged",
            "a sum is divided by the batch that was drawn",
        ),
    ),
    *group(
        "dpdist/training/private_step.py",
        "training/test_class_rates::test_records_of_each_class_join_at_their_own_rate",
        (
            "class_rates=step_plan.rates_by_class,",
            "class_rates=None,",
            "all records join at the largest rate",
        ),
    ),
    *group(
        "dpdist/training/estimate.py",
        "training/test_estimate::test_rates_by_class_are_priced_at_the_largest",
        (
            '"data": {"name": "data", **classes, **sampling},',
            '"data": {"name": "data"},',
            "an estimate is priced at equal rates",
        ),
    ),
    # --- class counts that were bought
    *group(
        "dpdist/privacy/pld.py",
        "privacy/test_bought_counts::test_the_price_is_that_of_the_histograms_themselves",
        (
            'scale = math.sqrt(2) if neighbours == "replace-one" else 1.0',
            'scale = 2.0 if neighbours == "replace-one" else 1.0',
            "a replaced record is priced as if it moved one count",
        ),
        (
            "return dpa.GaussianDpEvent(self.deviation / math.sqrt(sensitivity))",
            "return dpa.GaussianDpEvent(self.deviation)",
            "a ceiling counts a replaced record's counts as those of one more or less, and worse",
        ),
    ),
    *group(
        "dpdist/privacy/budget.py",
        "privacy/test_bought_counts",
        (
            "budgets, records, charge, terms, neighbours, name=name)\n",
            "budgets, records, charge, terms, neighbours, name=name, record=False)\n",
            "class counts are drawn and not charged",
        ),
        (
            "if before is not None and before.phases != charge.phases:",
            "if False:",
            "class counts are charged again at larger noise, in place of the first",
        ),
        (
            "{[phase.to_dict() for phase in charge.phases]} {said}",
            "{[phase.to_dict() for phase in charge.phases]}",
            "other counts get the same noise",
        ),
        (
            "    if any(each != answer for each in answers):\n",
            "    if False:\n",
            "a run takes other counts than those that were bought",
        ),
        (
            "    if not answers:\n        raise BudgetExceeded(\n",
            "    if not answers:\n        return\n        raise BudgetExceeded(\n",
            "a run takes counts that another budget paid for",
        ),
        (
            'if each.get("answer") == answer:',
            "if False:",
            "counts that were bought pass for public ones",
        ),
        (
            "        # Under one lock: between them another process could charge the same at other noise.\n",
            "    with _open_budgets(Path(folder)) as (key, budgets):\n",
            "class counts are charged anew by another process before they are drawn",
        ),
        (
            "if not spent + cost <= ceiling.share:",
            "if spent + cost > ceiling.share:",
            "a divergence that is no number fits under a ceiling",
        ),
    ),
    *group(
        "dpdist/training/job.py",
        "privacy/test_bought_counts::test_counts_of_features_are_not_charged_in_place_of_their_records",
        (
            "    refuse_budget_of_features(recipe, context)\n    source",
            "    source",
            "counts of features are charged to a budget that does not know their records",
        ),
    ),
    *group(
        "dpdist/privacy/card.py",
        "privacy/test_bought_counts::test_a_run_on_bought_counts_names_their_charge_and_counts_it",
        (
            'return total if total is not None and left_out(card_dict["assumptions"]) else own',
            "return own",
            "a model is said to tell no more than its steps, beside counts that were bought",
        ),
    ),
    # --- features
    *group(
        "dpdist/data/parquet.py",
        "test_conversion::test_features_say_so_themselves_without_the_file_beside_them",
        (
            ' or any(map(_is_features, folder.rglob("*.parquet")))',
            "",
            "features train as any table once the file beside them is gone",
        ),
    ),
    *group(
        "dpdist/data/adapters.py",
        "test_conversion::test_features_say_so_themselves_without_the_file_beside_them",
        (
            "if said := (table.schema.metadata or {}).get(FEATURES_KEY):",
            'if said := b"":',
            "an own loop's card leaves out what the network of its features saw",
        ),
    ),
    *group(
        "dpdist/training/provenance.py",
        "test_conversion",
        (
            'for file in sorted(folder.rglob("*.parquet")):',
            'for file in sorted(folder.glob("*.parquet")):',
            "other features lie in a folder below",
        ),
        (
            "    if data.holds_features(source.root, source.name):\n        return False",
            "    if False:\n        return False",
            "features are compared with records by content",
        ),
    ),
    *group(
        "dpdist/training/records.py",
        "test_conversion::test_features_are_no_public_records",
        (
            "    _refuse_features(root, named.dataset_name, named.recipe_key)\n",
            "",
            "a method reads features as public records",
        ),
        (
            '    _refuse_features(section.root, section.name, "public.data")\n',
            "",
            "features are public records to pretrain on",
        ),
    ),
    *group(
        "dpdist/training/job.py",
        "privacy/test_bought_counts::test_the_noise_is_as_large_as_the_relation_asks",
        (
            "noisy = add_noise(exact, key, deviation)",
            "noisy = add_noise(exact, key, noise)",
            "counts get less noise under replace-one than is priced",
        ),
    ),
    *group(
        "dpdist/runs/recipe.py",
        "privacy/test_bought_counts::test_a_run_without_the_budget_that_paid_is_refused",
        (
            'and (privacy.budget_ceiling is None or privacy.budget_composition != "filter"),',
            "and privacy.budget is None,",
            "a sum of epsilons is stated for a run that follows the counts that were bought",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        f"{OWN}::test_an_early_end_costs_all_planned_steps {OWN}::test_an_early_end_is_kept_where_a_crash_cut_it "
        f"{OWN}::test_what_changed_before_an_early_end_is_on_the_card",
        (
            "                charge_rest(self._step.ledger, self.plan.steps)\n",
            "",
            "an early end is charged for the steps taken",
        ),
        (
            '({"stopped": True} if self._stopped else {})',
            "({})",
            "an early end is forgotten by a restart",
        ),
        (
            '                self._look_between(self._done, "finish")\n',
            "",
            "weights put back before an early end are not on the card",
        ),
    ),
    *group(
        "dpdist/training/monitoring.py",
        f"{OWN}::test_an_early_end_costs_all_planned_steps",
        (
            'made["steps_taken"] = taken',
            'made["steps_taken"] = self.steps',
            "the card of an early end counts planned steps as taken",
        ),
    ),
    *group(
        "dpdist/training/model_setup.py",
        "wiring/test_nominal_records",
        (
            "    return 2 * (CANONICAL_SHARDS if",
            "    return 1 * (CANONICAL_SHARDS if",
            "a moved record changes one block",
        ),
        (
            "    engine.changed_blocks = changed_blocks(recipe)\n",
            "",
            "moved records have no room in the clip",
        ),
    ),
    *group(
        "dpdist/pipeline.py",
        "training/test_charging::test_a_run_that_its_budget_refuses_takes_no_name",
        (
            "        checked.check_budget(context)\n    work = checked",
            "        pass\n    work = checked",
            "a run that its budget refuses takes its name",
        ),
    ),
]
