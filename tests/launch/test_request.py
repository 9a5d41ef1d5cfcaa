import math
from typing import Any

import pytest

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.launch.request import RunRequest, check_request


def request(**asked: Any) -> RunRequest:
    return RunRequest(**{"command": ("true",), "workspace": "/work", **asked})


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"cores": 1},
        {"cores": 4096, "share_cores": True},
        {"cpus": CpuSet.of([0])},
        {"cpus": CpuSet.of([3, 5]), "share_cores": True, "sandbox": True},
        {"timeout_s": 0.001},
        {"timeout_s": 1e9},
        {"command": ("-x",)},
        {"command": ("true", "")},
    ],
)
def test_what_can_work(asked: dict[str, Any]) -> None:
    check_request(request(**asked))


@pytest.mark.parametrize(
    ("asked", "name", "said"),
    [
        ({"command": ()}, "empty-command", "no command"),
        ({"command": ("",)}, "empty-command", "no command"),
        ({"command": ("", "x")}, "empty-command", "no command"),
        ({"cores": 0}, "bad-cores", "--cores 0"),
        ({"cores": -3}, "bad-cores", "--cores -3"),
        ({"cpus": CpuSet()}, "bad-cpu-list", "--cpus"),
        ({"cores": 1, "cpus": CpuSet.of([0])}, "cores-and-cpus", "exclude"),
        ({"cores": 0, "cpus": CpuSet.of([0])}, "cores-and-cpus", "exclude"),
        ({"share_cores": True}, "nothing-to-share", "--share-cores"),
        ({"timeout_s": 0.0}, "bad-timeout", "--timeout 0"),
        ({"timeout_s": -1.5}, "bad-timeout", "--timeout -1.5"),
        ({"timeout_s": math.inf}, "bad-timeout", "--timeout inf"),
        ({"timeout_s": math.nan}, "bad-timeout", "--timeout nan"),
    ],
)
def test_what_can_never_work(asked: dict[str, Any], name: str, said: str) -> None:
    with pytest.raises(MalformedError) as caught:
        check_request(request(**asked))
    assert caught.value.name == name
    assert said in caught.value.message
    assert caught.value.fix
