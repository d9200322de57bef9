"""Faults in the reader of a release, and in what it is held against."""

from __future__ import annotations

from mutants.fault import Fault, group

RELEASE = "test_release"

FAULTS: list[Fault] = [
    *group(
        "dpdist/release/bundle.py",
        RELEASE,
        ("if _digest(folder / name) != stated[name]:", "if False:", "sums are not checked"),
        (
            "if _digest(folder / name) != stated[name]:",
            "if name != DESCRIPTION and _digest(folder / name) != stated[name]:",
            "the description may be changed",
        ),
        ("if not is_release_file(entry.name):", "if False:", "foreign files are let in"),
        (
            "stated.keys() != set(names)",
            "not stated.keys() <= set(names)",
            "a file without a sum is not missed",
        ),
        ("if rest or len(stated)", "if len(stated)", "sums may end without a line feed"),
        (
            "if not entry.is_file(follow_symlinks=False):",
            "if not entry.is_file():",
            "links out of a release are followed",
        ),
        (
            "        key.verify(\n"
            "            read_bytes(folder / SIGNATURE, _MAX_BYTES), read_bytes(folder / CHECKSUMS, _MAX_BYTES)\n"
            "        )",
            "        pass",
            "any signature is one",
        ),
    ),
    *group(
        "dpdist/release/bundle.py",
        RELEASE,
        (
            "    if signer is not None:\n        verify_signature",
            "    if False:\n        verify_signature",
            "the signer is not asked for",
        ),
        (
            "    if signer is not None:\n        verify_signature",
            "    if signer is not None and (path / SIGNATURE).exists():\n        verify_signature",
            "no signature is needed where one was asked for",
        ),
        (
            "if models.model_hash(self.path) != self.description.model:",
            "if False:",
            "the description speaks of another model",
        ),
        (
            "if not json_equal(find_noise_location(module).describe(), self.description.noise):",
            "if False:",
            "the noise is not that of the model",
        ),
        ("if not bool(tensor.isfinite().all()):", "if False:", "weights that are not finite"),
        (
            'if card["guarantee"]["delta"] != plan.delta:',
            "if False:",
            "epsilon is stated at another delta than its phases'",
        ),
        (
            "        _check_card_matches_description(card, about, path)\n",
            "",
            "the card speaks of another model",
        ),
        (
            "        models.check_trusted(spec, self.trusted_factory, self.path)\n",
            "",
            "foreign code is complained of as damage",
        ),
    ),
    *group(
        "dpdist/release/verify.py",
        RELEASE,
        (
            "        if not json_equal(said, value):",
            "        if False:",
            "epsilon is not computed again",
        ),
        (
            "        if not json_equal(said, value):",
            '        if name != "guarantee" and not json_equal(said, value):',
            "a card's guarantee need not follow from its phases",
        ),
        (
            "        if not json_equal(said, value):",
            '        if name != "epsilon_at_delta" and not json_equal(said, value):',
            "epsilons at other deltas need not follow from a card's phases",
        ),
        (
            "    if stated.keys() != again.keys():",
            "    if not again.keys() <= stated.keys():",
            "a card has entries of its own",
        ),
        ("        if not same:", "        if False:", "pages say what they like"),
        (
            "extract_numbers(stated) == extract_numbers(text)",
            "True",
            "another version's pages say what they like",
        ),
        (
            "said, value = replace_text_by_numbers(said), replace_text_by_numbers(value)",
            "said = value",
            "another version's card says what it likes",
        ),
        (
            "            if not json_equal(json.loads(json.dumps(said)), value):",
            "            if False:",
            "certified accuracy is not computed again",
        ),
    ),
    *group(
        "dpdist/release/tables.py",
        RELEASE,
        ("    _check_rows(table)\n", "", "counts are of more classes than the model tells"),
        (
            "return 0.0 if all(near) else 1.0",
            "return 0.0",
            "what equal counts certify is not compared as they are drawn again",
        ),
        (
            'if about["model"] != model_digest:',
            "if False:",
            "another model's certificates are released",
        ),
        ("        if off > most:", "        if False:", "any counts are the noise's"),
        ('if data.fingerprint != about["data"]', "if False", "counts are compared on any data"),
        (
            "if not np.array_equal(np.asarray(data.labels)[table.index], table.label):",
            "if False:",
            "labels are whatever the table says",
        ),
        ("if values > _MAX_VALUES:", "if False:", "a small file fills all memory"),
    ),
    *group(
        "dpdist/privacy/card.py",
        RELEASE,
        (
            "if at == delta and total < own * (1 - RELATIVE_TOLERANCE):",
            "if False:",
            "all runs together cost less than one of them",
        ),
        (
            "paths = whole.path_events(phases)",
            "paths = whole.path_events(phases[:0])",
            "a card is accounted without its phases",
        ),
    ),
    *group(
        "dpdist/release/bundle.py",
        RELEASE,
        (
            "if not language and list(self.classes) != self.data.class_names:",
            "if False:",
            "classes have other names than those of the test data",
        ),
        (
            'PER_CERTIFICATION_FIELDS = {"seed", ',
            "PER_CERTIFICATION_FIELDS = {",
            "the seed of a certification is released",
        ),
    ),
    *group(
        "dpdist/certification/table.py",
        "certification/test_two_class",
        (
            "        if not sound.all():",
            "        if False:",
            "radii need not follow from their counts",
        ),
    ),
    *group(
        "dpdist/certification/table_reader.py",
        RELEASE,
        ("    check_complete(found)\n", "", "half a table is taken for a whole one"),
    ),
    *group(
        "dpdist/models/builder.py",
        RELEASE,
        (
            "    if max_parameters is not None and numbers > max_parameters:",
            "    if False:",
            "a description asks for any memory",
        ),
    ),
    *group(
        "dpdist/reports/html.py",
        "reports/test_report",
        (
            '        pictures["certified_accuracy"] = standalone_svg(',
            '        pictures["certified_accuracy"] = ""; write_files_atomic({folder.report_file.parent / '
            '"certified_accuracy.svg": "x"}); standalone_svg(',
            "a report that fails has replaced a picture",
        ),
    ),
    *group(
        "dpdist/serving/deployment.py",
        RELEASE,
        (
            "if release.checksums != checksums:",
            "if False:",
            "answers are of another release than is described",
        ),
    ),
    *group(
        "dpdist/serving/deployment.py",
        "test_serving",
        (
            "zip(answers, found, strict=True)",
            "zip(answers, found[::-1], strict=True)",
            "requests of one call get each other's answers",
        ),
        ("if value is None:", "if False:", "a fault is given out as an answer"),
    ),
    *group(
        "dpdist/reports/compare.py",
        "reports/test_baseline",
        (
            "if not math.isinf(baseline.guarantee.epsilon):",
            "if False:",
            "a private run is shown as what there is without privacy",
        ),
    ),
    *group(
        "dpdist/models/weights.py",
        "test_importing",
        ("weights_only=True)", "weights_only=False)", "a file of weights may run code"),
        ("    if problems:\n", "    if False:\n", "missing weights are left as they began"),
    ),
    *group(
        "dpdist/importing.py",
        "test_importing",
        (
            "    spec = ModelSpec(name, shape, answers, options, foreign.mean, foreign.std)\n",
            "    spec = ModelSpec(name, shape, answers, options)\n",
            "the certified model is built without its normalisation",
        ),
        (
            "    if different:\n        raise DifferentRecipeError",
            "    if False:\n        raise DifferentRecipeError",
            "another model's certificates are taken for an import's",
        ),
        (
            "    network = models.build_model(spec).eval()\n",
            "    network = models.build_model(spec).train()\n",
            "the classes of an import are counted with dropout on",
        ),
        (
            "    if answers < known or (fixed and answers != known):\n",
            "    if False:\n",
            "a model of other classes than the data's is imported",
        ),
    ),
    *group(
        "dpdist/__init__.py",
        "test_vision",
        (
            "install_torchvision_hook()  # for what is imported after dpdist\n",
            "",
            "what imports torchvision is out of reach where torch has no CUDA",
        ),
    ),
    *group(
        "dpdist/data/test_inputs.py",
        "test_importing",
        (
            "    if pixels.shape == size and resize is None:\n",
            "    if pixels.shape == size:\n",
            "pictures of the right size are not resized although it was asked for",
        ),
    ),
    *group(
        "dpdist/cli/certify.py",
        "test_importing",
        (
            "            values = fit(decode_picture(",
            "            values = (decode_picture(",
            "predict sees another picture than certify",
        ),
    ),
    *group(
        "dpdist/data/text.py",
        "test_text_answers",
        (
            "_tokens([text])[0], dtype=np.int64)[:-1]\n",
            "_tokens([text])[0], dtype=np.int64)\n",
            "the next token is that of the end of a text",
        ),
        (
            "            while last > self._own_begin and encoded.special_tokens_mask[last - 1]:\n",
            "            while False:\n",
            "a tokenizer's own end is taken for the text's",
        ),
    ),
    *group(
        "dpdist/release/bundle.py",
        "test_text_answers",
        (
            "return self._scores(torch.from_numpy(row))[0, len(tokens) - 1]\n",
            "return self._scores(torch.from_numpy(row))[0, len(tokens) - 2]\n",
            "the answer is that of the last word but one",
        ),
        (
            "        if (there := {WORDS, TOKENIZER, SETTINGS} & sums.keys()) != wanted:\n",
            "        if False:\n",
            "a release may hold any tokenizer",
        ),
        (
            "    if spec.input_shape != (column.length,):\n",
            "    if False:\n",
            "a release says another number of tokens than its model reads",
        ),
    ),
    *group(
        "dpdist/reports/facts.py",
        "test_importing",
        (
            "        if self.plan.trained_elsewhere:\n            return NOT_TRAINED_HERE\n",
            "",
            "a model from elsewhere is said to have an infinite epsilon",
        ),
    ),
    *group(
        "dpdist/pipeline.py",
        "test_importing",
        ("    refuse_elsewhere(recipe, context)\n", "", "a model from elsewhere is trained again"),
    ),
    *group(
        "dpdist/release/model_card.py",
        "training/test_private_training::test_nothing_is_said_of_a_range_that_nobody_declared",
        (
            "len(spec.input_shape) == 3 and not description.raw_inputs",
            "len(spec.input_shape) == 3",
            "a script's model card says a range that nobody declared",
        ),
    ),
    *group(
        "dpdist/cli/certify.py",
        "test_importing::test_predict_without_noise_is_plain_and_says_so",
        (
            'typer.echo(f"{path}: {said} (no certificate)")',
            'typer.echo(f"{path}: {said}")',
            "a plain prediction looks like a certified one",
        ),
        (
            "    if sigma is None and not (asked or label_only or find_noise_location(model).is_random):\n",
            "    if sigma is None and not find_noise_location(model).is_random:\n",
            "draws for a certificate are asked for, and a plain prediction is given",
        ),
    ),
    *group(
        "dpdist/release/model_card.py",
        "test_release::test_the_model_card_states_the_population_as_all_others_do",
        (
            '    rows += [] if table.population is None else ["", f"{table.population}."]\n',
            "",
            "the model card says nothing of the population",
        ),
    ),
    *group(
        "dpdist/release/verify.py",
        "test_release::test_a_dossier_that_says_something_else_is_noticed",
        (
            "    if DOSSIER in release.checksums:\n",
            "    if False:\n",
            "verify does not read the dossier",
        ),
    ),
    *group(
        "dpdist/release/model_card.py",
        "test_release::test_a_dossier_tells_nothing_that_the_release_does_not",
        (
            "            _privacy_section(card),\n",
            '            str(card["guarantee"]["epsilon"] / 2),\n',
            "a dossier has an epsilon of its own",
        ),
        (
            '    false = "" if card["private"] else "This run is NOT private; the figures describe a mechanism."\n',
            '    false = ""\n',
            "a dossier's ledger does not say that a run is not private",
        ),
    ),
    *group(
        "dpdist/release/bundle.py",
        "test_importing::test_predict_brings_a_picture_to_the_input_as_certify_does",
        (
            "return pixels if pictures is None else pictures.fit(",
            "return pixels if True else pictures.fit(",
            "a release does not resize as its run did",
        ),
        (
            "return fit_picture(pixels, size, self.resize)",
            "return fit_picture(pixels, size, None)",
            "a release resizes in another way than its run",
        ),
    ),
]
