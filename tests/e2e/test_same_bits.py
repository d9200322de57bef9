"""A search in one process and on Ray has the same bits; small work needs no Ray."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from support.training import KEY, parameters, release_ids

import dpdist

SEED = "5b" * 32
RECIPE = {
    "name": "same",
    "data": {"name": "digits", "max_train": 400},
    "model": {"name": "small-cnn", "options": {"width": 4}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "run_key": KEY},
    "training": {"batch_size": 40, "steps": 4, "learning_rate": 0.5, "momentum": 0.5},
    "certify": {"sigma": 0.25, "n": 300, "n0": 20, "seed": SEED[:32], "max_inputs": 6,
                "backend": "eager", "batch": 100},
}  # fmt: skip


def test_a_search_has_the_same_trials_in_this_process_and_on_ray(tmp_path):
    recipe = {
        **{key: value for key, value in RECIPE.items() if key != "certify"},
        "tune": {
            "space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
            "num_trials": {"name": "fixed", "runs": 2},
        },
    }
    found = []
    for name in ("local", "ray"):
        folder = dpdist.run(recipe, runs=tmp_path / name, executor=name)  # type: ignore[arg-type]
        told = (folder.path / "trials.json").read_text()
        found.append((told, parameters(folder).numpy().tobytes(), release_ids(folder)))
    assert found[0] == found[1]


def test_small_work_by_command_loads_no_ray_and_listens_nowhere(tmp_path):
    """Training and certificates: Ray is not even imported."""
    (tmp_path / "recipe.yaml").write_text(dpdist.Recipe.model_validate(RECIPE).to_yaml())
    script = textwrap.dedent(
        """
        import gc, sys
        import psutil
        from dpdist.cli.main import main
        sys.argv = ["dpdist", "run", "recipe.yaml"]
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, stop.code
        gc.collect()
        process = psutil.Process()
        assert not [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        assert not process.children(recursive=True)
        assert "ray" not in sys.modules
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "this process" in done.stderr
