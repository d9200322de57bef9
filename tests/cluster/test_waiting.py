"""A cluster that has become too small for the work is named once, and once that it is whole."""

from dpdist.cluster.session import CapacityMonitor


def test_a_missing_host_is_told_once_each_time():
    said: list[str] = []
    have = {"CPU": 2.0, "GPU": 0.0}
    room = CapacityMonitor(
        "training", {"CPU": 2, "GPU": 0}, said.append, lambda: dict(have), poll_seconds=0
    )
    room.poll()
    assert said == []
    for _ in range(2):
        have["CPU"] = 1.0
        room.poll()
        room.poll()
        have["CPU"] = 2.0
        room.poll()
        room.poll()
    assert len(said) == 4
    assert "1 of 2 CPUs" in said[0]
    assert said[1] != said[0] and said[2:] == said[:2]


def test_it_does_not_ask_ray_at_every_look():
    asked: list[int] = []

    def have() -> dict[str, float]:
        asked.append(1)
        return {}

    room = CapacityMonitor("training", {"CPU": 1}, lambda line: None, have, poll_seconds=60)
    for _ in range(5):
        room.poll()
    assert not asked
