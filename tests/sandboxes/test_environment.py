"""The environment of sandboxes: its tools, its tests in a fresh sandbox, its state, and its page; over a real server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.config.sections.slurm import SandboxesConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.examples import rows_of
from hpcrl.envs.registry import common_extras
from hpcrl.envs.tasks.sandbox import SandboxEnvironment
from hpcrl.envs.terminal import tools
from hpcrl.envs.terminal.judge import judge
from hpcrl.envs.terminal.task import task_of
from hpcrl.envs.tools.sandboxes import SandboxClient, Sandboxes
from hpcrl.errors import ConfigError, DataError, SandboxError, ServiceError, UserCodeError
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rollout.rescore import rescore
from hpcrl.sandboxes import local, snapshots
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.local import configured_sandboxes
from hpcrl.types import Prompt, Work
from tests.golden.adapters.rollout import Engine
from tests.golden.letters import Letters
from tests.paths import ROOT
from tests.sandboxes.material import PATIENCE_S
from tests.sandboxes.test_images import docker_archive

PAGE = ROOT / "docs" / "environments" / "sandbox.md"
ROW = json.loads(rows_of("sandbox").read_text().splitlines()[0])
FILE = f"/repo/{ROW['task']}.py"
Make = Callable[..., SandboxEnvironment]


@pytest.fixture
def make(sandboxes: Sandboxes) -> Iterator[Make]:
    """Makes environments, which are closed with the test."""
    made = list[SandboxEnvironment]()

    def one(row: Mapping[str, Any], max_turns: int = 30, *, begin: bool = True) -> SandboxEnvironment:
        made.append(SandboxEnvironment({**common_extras(EnvironmentConfig(), max_turns, sandboxes), **row}))
        if begin:
            made[-1].init([])
        return made[-1]

    yield one
    for each in made:
        each.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def answer(turn: Turn) -> str:
    assert not turn.done, turn
    (message,) = turn.observations
    assert (message["role"], turn.reward) == ("tool", 0.0)
    return message["content"]


def shell(one: SandboxEnvironment, command: str, **more: Any) -> str:
    return answer(one.step(call("shell", command=command, **more)))


def judged_by(command: str, **more: Any) -> dict[str, Any]:
    """Return a row whose tests are a command."""
    return {"image": "python", "tests": {"command": command, **more}}


def test_commands_have_a_directory_a_time_and_bounded_output(make: Make) -> None:
    one = make(ROW)
    assert shell(one, "pwd; mkdir -p /a/b && cd /a/b") == "/repo"
    assert shell(one, "pwd; exit 3") == "/a/b\n(exit code 3)"
    assert shell(one, "echo out; echo err >&2; echo out") == "out\nerr\nout"
    assert shell(one, "sleep 600", seconds=0.3) == "(ended: it took more than 0.3 s)"
    assert shell(one, "cd /a; rm -r /a") == "(no output)"
    assert shell(one, "echo on").endswith("\non"), "its directory is gone"
    assert shell(one, "pwd; PWD=/$(python3 -c 'print(\"x\" * 9000)')") == "/"
    assert shell(one, "pwd") == "/", "no program chooses a path that long"
    assert shell(one, "cd /bin; set -- x y; : long; nothere").startswith("sh: "), "no error repeats the command"
    assert shell(one, "pwd; echo $#; cd /") == "/bin\n0", "and none of its words changes the directory"
    assert shell(one, "cd /repo; trap - EXIT; echo /no/path >&3") == "/no/path", "its shell ends without its directory"
    assert shell(one, "pwd") == "/"
    long = shell(one, "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i + 1)); done")
    assert long.startswith("line 0\n")
    assert long.endswith("line 2999")
    assert "characters are left out" in long
    assert len(long) < tools.CHARACTERS + 100
    assert shell(one, "cat /dev/zero").endswith("(ended: output)")


def test_work_goes_on_without_the_directory_of_the_image(make: Make, user: Path) -> None:
    packed = io.BytesIO()
    (user / "rootfs" / "srv").mkdir()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(user / "rootfs", ".")
    ImageStore(user / "root").add("placed", docker_archive(user / "placed.tar", packed.getvalue()))
    one = make({**ROW, "image": "placed", "directory": None})
    assert shell(one, "pwd") == "/srv"
    assert shell(one, "cd /; rm -r /srv; mkdir /a") == "(no output)"
    assert shell(one, "pwd; cd /a") == "/"
    assert answer(one.step(call("edit", path="b", old="", new="x"))) == "b is written"
    assert shell(one, "pwd; cat b") == "/a\nx"


def test_files_are_shown_and_changed(make: Make) -> None:
    one = make(ROW)

    def edit(path: str, old: str, new: str) -> str:
        return answer(one.step(call("edit", path=path, old=old, new=new)))

    assert edit("a/run", "", "#!/bin/sh\necho one two\n") == "a/run is written"
    assert shell(one, "python3 -c 'import os; os.chmod(\"a/run\", 0o755)'") == "(no output)"
    assert edit("a/run", "one", "three") == "a/run is changed in line 2"
    assert shell(one, "./a/run") == "three two", "it can be executed still"
    assert answer(one.step(call("view", path="a/run", first=2))) == "2  echo three two"
    assert edit("a/run", "e", "") == "error: the old text is in a/run 3 times; expected it exactly once"
    assert edit("a/run", "", "x") == "error: a/run exists; expected an old text that is in it"
    assert edit("b", "x", "y") == "error: b does not exist"
    assert edit("a/run/b", "", "y") == "error: /repo/a/run/b cannot be written"
    shell(one, "ln -s /etc/release linked")
    assert edit("linked", "tiny", "mine") == "linked is changed in line 1"
    assert shell(one, "cat /etc/release") == "mine", "of the sandbox"


WRONG = [
    ("<tool_call>{", "the call is not JSON"),
    ("<tool_call>[1]</tool_call>", 'expected {"name": "…", "arguments": {…}}'),
    (call("rm"), "there is no tool 'rm'"),
    (call("shell"), "missing: command"),
    (call("shell", command=["ls"]), "wrong: command"),
    (call("shell", command="ls", seconds=True), "wrong: seconds"),
    (call("shell", command="ls", path="/"), "wrong: path"),
    (call("shell", command="a\0b"), "no null characters"),
    (call("view", path="a\0b"), "expected the path of a file"),
    (call("view", path="/proc"), "/proc is no regular file, or too large"),
    (call("shell", command="ls", seconds=-1), "more than 0 seconds"),
    (call("shell", command="я" * 60_000), "refuses it; is it too long?"),
    (call("shell", command="x" * tools.LONGEST_CALL), "a call of more than"),
]


def test_a_wrong_call_costs_a_turn_and_nothing_else(make: Make) -> None:
    one = make(ROW)
    for count, (text, wrong) in enumerate(WRONG, 1):
        turn = one.step(text)
        assert answer(turn).startswith("error: ")
        assert wrong in answer(turn)
        assert (turn.metrics["calls"], turn.metrics["failed_calls"]) == (count, count)
    assert shell(one, "echo on") == "on"


def test_tests_decide_in_a_fresh_sandbox(make: Make) -> None:
    """The policy sees none of them; neither its processes nor what it has put in their place are there."""
    seen = "import os, sys; sys.exit(any(b'987' in open(f'/proc/{one}/cmdline', 'rb').read() for one in os.listdir('/proc') if one.isdigit()))"
    command = "test ! -e /tests/mine -a ! -e /logs/verifier/mine && cd /kept && python3 /tests/seen.py"
    row = judged_by(command, files={"/tests/seen.py": seen})
    one = make(row)
    assert "No such file" in shell(one, "ls /tests")
    shell(
        one,
        "mkdir -p /tests /logs/verifier /kept; echo > /tests/mine; echo > /logs/verifier/mine; cd /kept; sleep 987 >/dev/null 2>&1 &",
    )
    turn = one.step(call("submit"))
    assert (turn.reward, turn.done, turn.metrics["submitted"], turn.metrics["solved"]) == (1.0, True, 1.0, 1.0)


@pytest.mark.parametrize(("keep", "reward"), [(None, 1.0), (["/repo"], 0.0)])
def test_programs_that_the_policy_has_replaced(make: Make, keep: list[str] | None, reward: float) -> None:
    """Without `keep` they serve the tests, and all pass."""
    one = make({**ROW, "tests": {**ROW["tests"], "keep": keep}})
    own = "import os; os.chmod('/own', 0o755); os.replace('/own', '/bin/python3')"
    shell(one, f"echo '#!/bin/sh' > /own; python3 -c \"{own}\"")
    assert one.step(call("submit")).reward == reward


def test_what_is_kept_is_what_the_policy_has_made_of_it(make: Make) -> None:
    row = {
        **ROW,
        "files": {**ROW["files"], "/etc/task": "given\n"},
        "tests": {**ROW["tests"], "keep": ["//repo/", "/answer"]},
    }
    row["tests"]["command"] += " && test given = $(cat /etc/task) && test mine = $(cat /answer) && cat /etc/release"
    one = make(row)
    shell(one, f"cat > {FILE} <<'E'\n{next(iter(ROW['solution']['files'].values()))}E")
    shell(one, "echo mine > /answer; echo other > /etc/task; rm /etc/release; exec rm /bin/sh")
    turn = one.step(call("submit"))
    assert (turn.reward, turn.done) == (1.0, True)


def test_tests_begin_again_with_what_was_kept(make: Make, sandboxes: Sandboxes) -> None:
    """They began with all that the policy has changed, which nothing holds meanwhile: after half an hour it was gone."""
    begun = list[str | None]()

    class Losing(Sandboxes):
        def start(self, image: str, **how: Any) -> SandboxClient:
            begun.append(how["snapshot"])
            sandbox = super().start(image, **how)
            if len(begun) == 2:
                sandbox.end()
            return sandbox

    task = task_of(judged_by("test -e /kept/made -a ! -e /made", keep=["/kept"]))
    assert task.tests
    one = make(judged_by("true"))
    shell(one, "mkdir /kept; echo > /kept/made; echo > /made")
    changed = one._kept()
    assert judge(Losing(sandboxes._servers), task, task.tests, changed, network=False).reward == 1.0
    assert len(begun) == 3
    assert begun[0] == changed
    assert begun[1] == begun[2] != changed


@pytest.mark.parametrize(
    ("tests", "reward", "metrics"),
    [
        ({"command": "sleep 600", "seconds": 0.5}, 0.0, {"tests_ended": 1.0}),
        ({"command": "echo 0.25 > /logs/verifier/reward.txt", "scoring": "file"}, 0.25, {}),
        ({"command": "echo 7 > /logs/verifier/reward.txt; echo '{\"a\": 1}' > /logs/verifier/reward.json", "scoring": "file"}, 7.0, {}),
        ({"command": "echo '{\"reward\": 0.5, \"speed\": 3}' > /logs/verifier/reward.json", "scoring": "file"}, 0.5, {"speed": 3.0}),
        (
            {"command": "cd /logs/verifier; echo nan > reward.txt; python3 -c 'import json; print(json.dumps(dict(reward=10**400)))' > reward.json", "scoring": "file"},
            0.0,
            {},
        ),
        ({"command": "ln -s /etc /logs/verifier/reward.txt", "scoring": "file"}, 0.0, {}),
        ({"command": "echo PASSED t.py::a; echo FAILED t.py::b - no", "scoring": "cases"}, 0.0, {"cases": 0.5}),
        (
            {"command": "echo PASSED t.py::a; echo FAILED t.py::b - no", "scoring": "cases", "fail_to_pass": ["t.py::a"]},
            1.0,
            {"fail_to_pass": 1.0, "pass_to_pass": 1.0},
        ),
        (
            {"command": "echo PASSED t.py::a", "scoring": "cases", "fail_to_pass": ["t.py::a"], "pass_to_pass": ["t.py::c"]},
            0.0,
            {"pass_to_pass": 0.0},
        ),
    ],
)  # fmt: skip
def test_rewards(make: Make, tests: dict[str, Any], reward: float, metrics: dict[str, float]) -> None:
    turn = make({"image": "python", "tests": tests}, 1).step("I am done.")
    assert (turn.reward, turn.done) == (reward, True)
    assert turn.metrics | metrics == turn.metrics


def test_the_last_turn_is_judged_too(make: Make) -> None:
    one = make(ROW, 2)
    turn = one.step(call("shell", command=f"cat > {FILE} <<'E'\n{next(iter(ROW['solution']['files'].values()))}E"))
    assert not turn.done
    turn = one.step(call("shell", command="echo on"))
    assert (turn.reward, turn.done, turn.metrics["submitted"]) == (1.0, True, 0.0)


def test_what_leaves_no_room_for_tests_is_worth_nothing(make: Make) -> None:
    one = make(judged_by("true"))
    shell(one, "ln -s /proc /logs")
    turn = one.step(call("submit"))
    assert (turn.reward, turn.done, turn.metrics["tests_ended"]) == (0.0, True, 1.0)


def test_another_process_goes_on_from_a_state(make: Make) -> None:
    one = make(ROW, 4)
    shell(one, "echo mine > /repo/kept; cd /tmp")
    state = one.state()
    assert state is not None
    assert one.state() == state
    shell(one, "echo later > /repo/kept; cd /")
    other = make(ROW, 4, begin=False)
    other.resume(state)
    assert shell(other, "pwd; cat /repo/kept") == "/tmp\nmine"
    shell(other, "true")
    turn = other.step(call("shell", command="true"))
    assert turn.done, "the fourth turn, of which one was before"
    assert turn.metrics["calls"] == 4
    with pytest.raises(UserCodeError, match="begins with its snapshot"):
        make(ROW, begin=False).resume(state.replace(json.loads(state)["snapshot"], "0" * 64))
    with pytest.raises(DataError, match="expected the state of an episode"):
        make(ROW, begin=False).resume('{"snapshot": 1}')


def test_tests_get_what_programs_in_the_background_have_written(make: Make) -> None:
    one = make(judged_by("test -e /late"))
    assert shell(one, "(while test ! -e /go; do sleep 0.1; done; echo > /late) > /dev/null 2>&1 &") == "(no output)"
    one.state()
    one._working().sandbox.write("/go", b"")
    one._working().sandbox.run(["sh", "-c", "while test ! -e /late; do sleep 0.1; done"], PATIENCE_S)
    assert one.step(call("submit")).reward == 1.0


def test_a_lost_sandbox_begins_again_where_nothing_is_lost(make: Make) -> None:
    one = make(ROW)
    one._working().sandbox.end()
    assert shell(one, f"cat {FILE}; echo kept > /repo/kept").startswith("def ")
    one.state()
    one._working().sandbox.end()
    assert shell(one, "cat /repo/kept; echo more > /repo/kept") == "kept"
    one._working().sandbox.end()
    assert shell(one, "cat /repo/kept") == "more", "also without a question for the state"
    one._working().changed = True  # by what no snapshot could take
    one._working().sandbox.end()
    with pytest.raises(UserCodeError, match="lost with its changes"):
        one.step(call("shell", command="cat /repo/kept"))


@pytest.mark.parametrize(
    ("column", "value", "wrong"),
    [
        ("image", "", "`image`"),
        ("tests", None, "`tests`"),
        ("tests", {"command": ""}, "`command`"),
        ("tests", {"command": "true", "seconds": -1}, "more than 0"),
        ("tests", {"command": "true", "seconds": 1e9}, "at most 86400"),
        ("tests", {"command": "true", "seconds": 300}, "environment.timeout_seconds is 300"),
        ("tests", {"command": "true", "seconds": 60, "scoring": "luck"}, "one of exit_code, file, cases"),
        ("tests", {"command": "true", "seconds": 60, "files": {"relative": "x"}}, "'relative'"),
        ("tests", {"command": "true", "seconds": 60, "files": {"/a": 1}}, "'/a'"),
        ("tests", {"command": "true", "seconds": 60, "files": {"/a": {"base64": "?"}}}, "'/a'"),
        ("tests", {"command": "true", "seconds": 60, "environment": {"A=B": "x"}}, "names of variables"),
        ("tests", {"command": "true", "seconds": 60, "fail_to_pass": "a"}, "a list of names"),
        ("tests", {"command": "true", "seconds": 60, "keep": "/a"}, "a list of names"),
        ("tests", {"command": "true", "seconds": 60, "keep": ["a"]}, "absolute paths without .., found 'a'"),
        ("tests", {"command": "true", "seconds": 60, "keep": ["/a/../b"]}, "absolute paths without .."),
        ("tests", {"command": "true", "seconds": 60, "keep": ["/" + "a" * 4000] * 3}, "at most 8192 letters together"),
        ("files", {"/a": "x" * (9 << 20)}, "put them into the image"),
        ("directory", 3, "a text, or nothing"),
    ],
)  # fmt: skip
def test_a_row_that_lacks_something_is_an_error(column: str, value: Any, wrong: str) -> None:
    with pytest.raises(DataError, match=re.escape(wrong)):
        SandboxEnvironment({**common_extras(EnvironmentConfig(), 4), **ROW, column: value})


def test_what_does_not_begin(make: Make) -> None:
    with pytest.raises(ConfigError, match=re.escape("[slurm.sandboxes]")):
        SandboxEnvironment({**common_extras(EnvironmentConfig(), 4), **ROW}).init([])
    with pytest.raises(SandboxError, match="there is no image 'other'"):
        make({**ROW, "image": "other"})
    with pytest.raises(UserCodeError, match=r"the setup of task .* ended with exit code 2: why"):
        make({**ROW, "setup": "echo why; exit 2"})


def test_a_group_is_generated_with_sandboxes(sandboxes: Sandboxes) -> None:
    """Of two samples one corrects the file; the policy's texts alone are trained, and the reward stands at the end of the last."""
    wrong, right = (row.splitlines()[2] for row in (ROW["files"][FILE], next(iter(ROW["solution"]["files"].values()))))
    texts = [call("view", path=FILE), call("edit", path=FILE, old=wrong, new=right), call("submit")]
    tokenizer, extras = Letters(), {name: value for name, value in ROW.items() if name not in ("prompt", "env_class")}
    prompt = Prompt("row0", ROW["prompt"], "sandbox", extras)
    config = GeneratorConfig(max_turns=4, n_samples_per_prompt=1)

    async def generate(said: list[str]) -> Group:
        script = [{"ids": [*tokenizer.encode(text), tokenizer.eos_token_id], "stop": "stop"} for text in said]
        generator = GroupGenerator(Engine(script), tokenizer, config, EnvironmentConfig(), sandboxes=sandboxes)
        return await generator.generate(Work("g0", "train", prompt, 1, 0))

    for said, reward in ((texts, 1.0), (texts[:1] + texts[2:], 0.0)):
        group = asyncio.run(generate(said))
        (sample,) = group.samples
        assert group.failures == []
        assert [one["content"] for one in group.conversations[0] if one["role"] == "assistant"] == said
        assert sample.env_metrics["solved"] == reward
        assert sample.rewards.tolist() == [0.0] * (len(sample.rewards) - 1) + [reward]
        assert int(sample.loss_mask.sum()) == sum(len(text) + 1 for text in said)


def test_samples_of_an_evaluation_are_played_again(sandboxes: Sandboxes, user: Path) -> None:
    """As `hpcrl rescore` does: what the policy has said is called again in new sandboxes, and the tests of the row as it is now decide."""
    prompts = {"g0": Prompt("row0", ROW["prompt"], "sandbox", judged_by("test -e /made"))}
    made = [{"role": "assistant", "content": call("shell", command="echo > /made")}, {"role": "tool", "content": ""}]
    line = {"group_id": "g0", "stop_reason": "stop", "parts": [{"by": "policy", "tokens": 9}], "score": 0.5}
    samples = {
        ("g0", at): {**line, "response": [*said, {"role": "assistant", "content": "Done."}]}
        for at, said in enumerate((made, []))
    }
    sections = EnvironmentConfig(), GeneratorConfig(max_turns=4)
    found = asyncio.run(rescore(samples, prompts, *sections, sandboxes, 1))
    assert ([one["score"] for one in found.lines], found.failures) == ([1.0, 0.0], [])
    with (
        configured_sandboxes(SandboxesConfig(), user) as none,
        pytest.raises(ConfigError, match=re.escape("[slurm.sandboxes]")),
    ):
        asyncio.run(rescore(samples, prompts, *sections, none))


def test_the_sandboxes_of_a_configuration(user: Path, sandboxes: Sandboxes) -> None:  # noqa: ARG001 - makes the image
    asked = SandboxesConfig(nodes=3, per_node=1, network=["python"], files=40)
    with configured_sandboxes(asked, user / "root") as served:
        assert served is not None
        one = served.start("python", network=True)
        with pytest.raises(ServiceError, match="at most 1"):
            served.start("python", wait_s=0.0)
        many = one.run(
            ["sh", "-c", "i=0; while [ $i -lt 60 ]; do echo > /f$i || exit 3; i=$((i + 1)); done"], PATIENCE_S
        )
        assert many.code, "files has no effect"
        one.end()


@pytest.mark.usefixtures("sandboxes")
def test_snapshots_of_a_command_go_when_they_are_old(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "COLLECT_S", 0.1)
    with local.local_sandboxes(user / "root", 1) as served:
        one = served.start("python")
        one.write("/made", b"content")
        name = one.snapshot()
        (listed,) = user.glob(f"temporary/*/kept/{name}.blocks")
        monkeypatch.setattr(snapshots, "KEPT_S", 0.0)
        deadline = time.monotonic() + PATIENCE_S
        while listed.exists() or list(listed.parent.glob("blocks/*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        one.end()


def test_the_page_goes_as_it_says(make: Make) -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    played = json.loads(text)
    one = make(played["row"])
    for expected in played["turns"]:
        turn = one.step(expected["action"])
        found = {"action": expected["action"], "reward": turn.reward}
        assert found | ({} if turn.done else {"observation": turn.observations[0]["content"]}) == expected
    assert turn.done
