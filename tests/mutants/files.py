"""Faults in what is read, archived and served."""

from __future__ import annotations

from mutants.fault import Fault, group

ARCHIVE = "test_archive"
CHARGED = f"{ARCHIVE}::test_every_step_with_leave_is_charged_when_a_run_is_restored"
OPEN = f"{ARCHIVE}::test_whether_an_object_is_read_by_all_is_tried_without_credentials"
UNDER_WAY = "test_serving::test_too_many_under_way_are_sent_away"

SOURCES = "data/test_init_columns::test_a_record_that_was_taken_out_of_csv_is_not_trained_on"
OWN = "data/test_init_columns::test_parquet_that_init_did_not_make_is_never_replaced"
NOBODY = "data/test_init_columns::test_records_of_nobody_in_parquet_are_no_group"
EMPTY = "data/test_init_columns::test_an_empty_label_of_parquet_is_refused_by_its_row"
BLANK = "data/test_init_columns::test_empty_labels_and_texts_of_csv_are_refused_by_their_line"
ALIKE = "data/test_init_columns::test_classes_that_differ_in_blanks_alone_are_refused"

FAULTS: list[Fault] = [
    *group(
        "dpdist/training/job.py", SOURCES,
        ("        data.check_sources(source.root / source.name)\n    test =", "        pass\n    test =",
         "a record that was taken out of its file is trained on"),
        ("        data.check_sources(source.root / source.name)\n    records =",
         "        pass\n    records =", "counts are bought of records that were taken out"),
    ),
    *group(
        "dpdist/data/parquet.py", f"{SOURCES} {OWN}",
        ("(_stamp(folder, name) == said[0] or _content(folder, name) == said[1])", "True",
         "any source is the one that Parquet was made of"),
        ("return there and _is_same(folder, name, self.files[name])", "return there",
         "Parquet of a user's own is taken for what init made"),
    ),
    *group(
        "dpdist/data/parquet.py",
        "data/test_init_columns::test_a_source_that_changes_while_it_is_read_is_refused",
        ("if changed := [name for name, stamp in stamps.items() if _stamp(folder, name) != stamp]:",
         "if changed := []:", "a source that changes while it is read is on record as it is then"),
    ),
    *group(
        "dpdist/data/parquet.py",
        "data/test_init::test_pictures_that_changed_are_read_anew_and_others_are_told",
        ("        for path in pictures_in(kind):\n            yield os.fsencode",
         "        for path in [*pictures_in(kind)][:1]:\n            yield os.fsencode",
         "of a class one picture alone is looked at"),
    ),
    *group(
        "dpdist/data/discovery.py", SOURCES,
        ("current = not changed and len(own)", "current = len(own)",
         "init takes Parquet whose sources changed"),
    ),
    *group(
        "dpdist/data/record_hashes.py", NOBODY,
        ("        return not value.strip()\n", "        return False\n",
         "strangers without a name are one person"),
        ("(int, str) or names_nobody(value):", "(int, str):", "an empty text has the hash of a group"),
    ),
    *group(
        "dpdist/data/parquet.py",
        f"{NOBODY} "
        "data/test_init_columns::test_a_person_whose_name_has_a_blank_behind_it_is_not_two",
        ("        if self._unknown:\n", "        if False:\n", "records of nobody are read as a group"),
        ("len({text.strip() for text in texts})", "len(texts)",
         "a blank behind a name makes a person two"),
    ),
    *group(
        "dpdist/private_training.py",
        "training/test_private_training::test_units_are_equal_by_value",
        ("    if isinstance(unit, Tensor) or names_nobody(unit):",
         "    if isinstance(unit, Tensor) or unit is None or unit != unit:",
         "records whose unit_id is an empty text are one person's"),
    ),
    *group(
        "dpdist/data/adapters.py", NOBODY,
        ("column.null_count or any(map(names_nobody, encoded.dictionary.to_pylist()))",
         "column.null_count", "strangers in a table are one unit"),
    ),
    *group(
        "dpdist/data/adapters.py", "data/test_protocol::test_unknown_units_are_refused",
        ("    if any(map(names_nobody, found)):", "    if any(each is None for each in found):",
         "strangers without a name are one unit"),
    ),
    *group(
        "dpdist/data/discovery.py", f"{BLANK} {ALIKE} {EMPTY}",
        ("            if (row := _first_blank(table[label])) is not None:", "            if False:",
         "an empty label is a class"),
        ("                row = _first_blank(table[column])\n", "                row = None\n",
         "empty labels of test records and empty texts are taken"),
        ("(other := one.strip()) != one and other in found", "False",
         "a class with a blank behind it is another one"),
    ),
    *group(
        "dpdist/data/protocol.py",
        "data/test_protocol",
        ("blake2b(key=key, digest_size=16, person=b\"dpdist.records\")", "blake2b(digest_size=16, person=b\"dpdist.records\")", "anybody can test a guess of the records"),
        ("    label = struct.pack(\"<q\", index)", "    label = struct.pack(\"<q\", 0)", "all records of a step see one draw"),
        ("    for index in range(len(records)):\n", "    for index in range(0):\n", "who a record belongs to is not in the fingerprint"),
        ("        yield array.tobytes()", "        yield array.tobytes()[:8]", "most of a record is not in the fingerprint"),
        ('            yield _tagged(b"bfloat16", b"")\n', "", "bfloat16 numbers and their bits have one fingerprint"),
        ("{array.dtype.str}{np.shape(value)}", "{array.dtype.str}", "records of another shape have the same fingerprint"),
        ("        np.random.set_state(states[1])\n", "", "what a transform draws moves numpy's generator"),
        ("    random.seed(seed)\n", "", "transforms that use random are drawn anew in a replay"),
    ),
    *group(
        "dpdist/data/adapters.py",
        "data/test_protocol",
        ("np.ma.is_masked(column)", "False", "masked numbers are trained on"),
        ('"a sparse one": column.layout is not torch.strided', '"a sparse one": False', "sparse numbers are torch's error"),
        ("array.flags.writeable and min(array.strides, default=0) >= 0", "array.flags.writeable", "reversed arrays are torch's error"),
        ("        records._key, records._last = key, None", "        records._last = None", "every step sees one draw"),
        ("            kind = type(error).__name__\n        self._options.refuse(\n            f\"record {index}", "            kind = str(error)\n        self._options.refuse(\n            f\"record {index}", "an error shows what a data set's code said of a record"),
        ("item = self._collate([item])", "item = self._collate([item, item])", "a loader's collate function sees records together"),
        ("    if loader.drop_last:", "    if False:", "a loader that drops records is taken"),
        ("    if isinstance(sampler, torch_data.WeightedRandomSampler):", "    if False:", "weights are replaced without a word of what to do"),
        ("type(batches) is not torch_data.BatchSampler", "False", "batches of one's own are taken"),
        ("            setattr(plain, name, _UNCHANGED[name])", "            pass", "random transforms are in the fingerprint"),
        ("    return torch.as_tensor(np.asarray(indices, dtype=np.int64))", "    return torch.as_tensor(np.sort(np.asarray(indices, dtype=np.int64)))", "records are not in the order asked for"),
        ("    if int(target.max()) >= options.classes or", "    if False or", "labels beyond the classes are taken"),
        ("        if self._last is None or self._last[0] != mark:", "        if True:", "targets are of another draw than inputs"),
    ),
    *group(
        "dpdist/data/synthetic.py",
        "data/test_invented",
        ("    things = _random_object_classes(np.random.Generator(np.random.Philox(key=0)), classes)\n    rng = np.random.Generator(np.random.Philox(key=1 + seed)", "    things = _random_object_classes(np.random.Generator(np.random.Philox(key=0)), classes)\n    rng = np.random.Generator(np.random.Philox(key=1)", "every seed draws the same"),
        ("    things = _random_object_classes(np.random.Generator(np.random.Philox(key=0)), classes", "    things = _random_object_classes(np.random.Generator(np.random.Philox(key=seed)), classes", "each seed has its own things"),
        ("image.mean(1, keepdims=True)", "image", "nothing has its own saturation"),
        ("squared ** (-_per_image(exponent) / 2)", "squared ** 0.5", "clouds are noise of pixels"),
    ),
    *group(
        "dpdist/models/zoo.py",
        "models/test_models",
        ("stride = 1 if depth else 2", "stride = 2 if depth else 1", "maps have another size"),
        ("        layers.append(nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2))\n        if groups:", "        layers.append(nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2))\n        if groups > 99:", "GroupNorm is left out"),
    ),
    *group(
        "dpdist/training/provenance.py",
        "training/test_denoised_smoothing",
        ("made = (\n"
         "                pretraining_settings(PublicRecipe.model_validate(made | {\"weights\": None}))\n"
         "                | weights\n"
         "            )", "pass",
         "older parts are refused"),
        ("key=lambda found: found[1] is None", "key=lambda found: 0",
         "a key that came later is blamed for another"),
        ("iter_differences(made, pretraining_settings(section)", "iter_differences(made, made", "any settings made the part"),
    ),
    *group(
        "dpdist/data/record_hashes.py",
        "data/test_sealed",
        ("!= said and _digest(path) != said[-1]", "!= said and False", "any bits are the records'"),
        ("[info.st_size, info.st_mtime_ns]", "[info.st_mtime_ns]", "a size is not looked at"),
    ),
    *group(
        "dpdist/reports/facts.py",
        "reports/test_reading_runs",
        ('sound &= found["accuracy"] == found["correct"] / asked', "pass", "any accuracy is shown"),
        (
            '_check_same_model(trained, [(folder.evaluation, evaluation.get("model"))])',
            "pass",
            "another model's accuracy is shown",
        ),
    ),
    *group(
        "dpdist/data/record_hashes.py",
        "data/test_sealed",
        ("raw[-_BYTES:] != _checksum(raw[:-_BYTES])", "False", "any bits are the records' hashes"),
    ),
    *group(
        "dpdist/data/record_hashes.py",
        "data/test_overlap",
        ("seen + np.float32(0)", "seen", "minus zero makes another record"),
        (
            "(words >> np.uint64(11)) * 2.0**-53",
            "(words >> np.uint64(12)) * 2.0**-53",
            "records lie in the first half",
        ),
    ),
    *group(
        "dpdist/data/dataset.py",
        "data/test_overlap training/test_initial_weights",
        (
            "    if found:\n        some",
            "    if found and found > 1:\n        some",
            "one shared record is nothing",
        ),
        ("both = count_common_records(public, test)", "both = None", "public records may be the test's"),
    ),
    *group(
        "dpdist/training/records.py",
        "data/test_overlap training/test_initial_weights wiring/test_nominal_records tuning/test_scoring",
        (
            "return _own_split(recipe, source).select_by_hash(recipe.data.public, 1.0)",
            "return _own_split(recipe, source).select_by_hash(recipe.data.public, 0.5)",
            "half of the private records are compared",
        ),
        (
            'check_test_split(private_records(recipe, source), test, "data.test")',
            "pass",
            "private records may be tested on",
        ),
        (
            "math.ceil(share * 10**digits - 1e-9) / 10**digits",
            "share",
            "the share that is used is exact",
        ),
        (
            "end = section.hold_out + section.fraction * (1 - section.hold_out)",
            "end = 1.0",
            "data.fraction is not executed",
        ),
    ),
    *group(
        "cluster/object_store.py",
        f"{ARCHIVE}::test_addresses_that_cannot_be_used_are_explained",
        ('if "@" in parts.netloc or set(parse_qs(parts.query)) - _OPTIONS:', "if False:",
         "credentials in an address are stored"),
    ),
    *group(
        "cluster/object_store.py",
        f"{ARCHIVE}::test_an_object_that_cannot_be_written_whole_leaves_the_one_before",
        ('f"{folder}/.{base}.{secrets.token_hex(4)}" if self._local else target', "target",
         "objects on a file system are written in place"),
        ("                        self._fs.delete_file(partial)\n", "                        pass\n",
         "a part of an object stays"),
    ),
    *group(
        "cluster/object_store.py",
        f"{ARCHIVE}::test_an_object_is_written_no_further_than_its_manifest_says",
        ("        if len(raw) > max_bytes:\n", "        if False:\n", "an object beyond its limit is read"),
    ),
    *group(
        "cluster/object_store.py",
        OPEN,
        ('        if parts.scheme != "s3":\n', "        if True:\n", "an open bucket is not noticed"),
        ("anonymous=True, **options", "**options", "whether a stranger may read is tried as its owner"),
    ),
    *group(
        "dpdist/reports/figures.py", "reports/test_figures",
        ('{"svg.hashsalt": "dpdist"}', '{"svg.hashsalt": None}', "a figure's bytes differ each time"),
        ('None if "SOURCE_DATE_EPOCH" in os.environ else _DATES.get(file_format)', "None",
         "figures are dated by the clock"),
    ),
    *group(
        "dpdist/core/fields.py", "test_file_shapes",
        ('extra="ignore", frozen=True, strict=True', 'extra="ignore", frozen=True',
         "true in a file is taken for a number"),
        ("type(value) not in (int, float) or not abs(value) < 2**63:", "False:",
         "a text in a file is taken for a number"),
        ("cls.newest_format is not None and type(version) is int and version > cls.newest_format:",
         "False:", "a file of a newer version is read"),
    ),
    *group(
        "dpdist/runs/archive.py",
        "test_archive test_archive_names",
        (
            "if not hmac.compare_digest(str(check), manifest_digest(record)):",
            "if False:",
            "a changed manifest is believed",
        ),
        ("for number in numbers:\n        name", "for number in reversed(numbers):\n        name",
         "the oldest manifest is taken for the newest"),
        ("self.step > self.steps", "False", "a permit may end before it begins"),
        ("if keyed != bool(archive_key()):", "if False:", "a manifest without the key is taken"),
    ),
    *group(
        "dpdist/runs/archive.py",
        "test_archive",
        ("if found != (entry.digest, entry.size):", "if False:", "a torn file is taken"),
        (
            "if step not in known:\n                        ledger.record(step, secrets.token_hex(32))\n                        charged += 1",
            "pass",
            "what the lost folder may have released is free",
        ),
        ("target.chmod(0o600)", "pass", "private files of a restored run can be read"),
        (
            'ledger.new_epoch("restored from an archive")',
            "pass",
            "a restored run goes on in the old attempt",
        ),
        ('if rivals != [about["claim"]]:', "if False:", "two may restore at once"),
    ),
    *group(
        "dpdist/runs/archive.py",
        CHARGED,
        ("        _, manifest = newest_manifest(store)\n        with", "        pass\n        with",
         "leave that was given until a run was taken over is forgotten"),
        ("known = ledger.released_steps(permit.epoch)", "known = set(ledger.release_counts)",
         "steps that other attempts released are not charged again"),
        ("range(permit.step, permit.steps)", "range(permit.step + 1, permit.steps)",
         "the first step with leave is free"),
        ("range(permit.step, permit.steps)", "range(permit.step, permit.steps - 1)",
         "the last step with leave is free"),
        ('number = max(number, *(claim_number(claim) for claim in store.list_names("claims"))) + 1',
         "number = number + 1", "a claim without an upload ends an archive"),
    ),
    *group(
        "dpdist/runs/archive.py",
        CHARGED,
        ("            continue  # its owner", "            break  # its owner",
         "a claim without an upload hides the manifests before it"),
    ),
    *group(
        "dpdist/data/parquet.py", "data/test_parquet",
        ("    if batch is not None or first_row != counted:\n", "    if False:\n",
         "rows that are not there are records of zeros"),
        ("            batch.validate(full=True)\n", "            pass\n",
         "text that is not UTF-8 ends in a traceback"),
    ),
    *group(
        "dpdist/core/files.py", "data/test_init",
        ("    if min(rows, default=0) < 0 or sum(rows) != about.num_rows:\n", "    if False:\n",
         "a footer that contradicts itself is believed"),
    ),
    *group(
        "dpdist/data/parquet.py", "data/test_images",
        ("    if found < wanted:\n", "    if False:\n", "a cut picture is black where it ends"),
    ),
    *group(
        "dpdist/runs/archive.py",
        "test_archive",
        ("raw[: raw.rfind(b\"\\n\") + 1]", "raw", "a torn line of the ledger is archived"),
        ("            and not path.is_symlink()\n", "", "links in private/ are followed"),
        ("            if not top.is_symlink()  #", "            if True  #",
         "links to folders in private/ are followed"),
        ('            and not path.name.startswith(".")\n', "", "files that are being written are archived"),
        ("read_permit(self.folder.permit_request) if self.private else None\n        first",
         "read_permit(self.folder.permit) if self.private else None\n        first",
         "the manifest holds the granted permit"),
        ("            if not bound:", "            if False:", "a mistyped address binds the run"),
        (
            "        self._check_claim()\n        kept",
            "        kept",
            "an owner that was replaced goes on",
        ),
        (
            "if self.private and self.store.is_public",
            "if False and self.store.is_public",
            "an open bucket gets the run key",
        ),
        (
            "            if permit is not None:\n                write_json(self.folder.permit, permit.model_dump())",
            "            if asked is not None:\n                write_json(self.folder.permit, asdict(asked))",
            "a permit is granted that the archive may not hold",
        ),
    ),
    *group(
        "dpdist/serving/app.py",
        "test_serving",
        ("if self._in_progress >= limits.max_concurrent:", "if False:", "any number of requests may wait"),
        ("if self._tokens < 1:", "if False:", "no rate is kept"),
        (
            "                    if len(read) > most:\n                        raise too_large",
            "                    pass",
            "a body has no end",
        ),
        ("self._in_progress -= 1", "pass", "a place is never given back"),
    ),
    *group(
        "dpdist/serving/app.py",
        UNDER_WAY,
        ("if self._in_progress >= limits.max_concurrent:", "if self._in_progress > limits.max_concurrent:",
         "one request more than may be is under way"),
    ),
    *group(
        "dpdist/serving/app.py",
        "test_serving",
        ("        self._tokens -= 1\n", "", "requests use up no rate"),
        ("asyncio.timeout(min(self._limits.timeout_seconds, _BODY_SECONDS))", "asyncio.timeout(None)",
         "a body that never comes holds a place"),
        ("asyncio.timeout(min(self._limits.timeout_seconds, _BODY_SECONDS))",
         "asyncio.timeout(self._limits.timeout_seconds)", "a body may take as long as an answer"),
        ("            to_model_input(image, self._input_shape, bounded=self._bounded)\n", "", "numbers of any range and shape are asked"),
    ),
]  # fmt: skip
