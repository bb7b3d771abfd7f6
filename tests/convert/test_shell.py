"""What a shell script would start, found without running it: compared with bash, which runs the same script."""

import subprocess
from pathlib import Path

import pytest

from hpcrl.convert.script import command_of
from hpcrl.convert.shell.run import follow
from hpcrl.errors import ConfigError

LIKE_BASH = {
    "arithmetic": "A=3\nrun a.b=$((A * 1024 + 2 ** 3 - 7 / 2)) c.d=$(( (A - 5) % 2 )) e.f=$((A > 2 && A != 4))",
    "arithmetic of variables": "A=4\nB=$((A * 2))\nlet_it=$B\nrun a.b=$((B * $A)) c.d=$((-7 / 2)) e.f=$((${A} << 2))",
    "condition": 'MODE=lora\nif [ "$MODE" == "full" ]; then LR=1e-6; elif [[ $MODE == lo* ]]; then LR=3e-5; else LR=0; fi\nrun a.lr=$LR',
    "false condition": "X=1\nif [ $X -gt 1 ]; then\n  run a.b=1\nfi\nrun a.b=2",
    "no else": 'if [[ -z "$NOT_SET" && ! ( 2 -lt 1 ) ]]; then A=1; fi\nrun a.b=$A',
    "lists": 'USE=true\n[ "$USE" = true ] && A=1 || A=2\n[[ "$USE" != true ]] && B=1 || B=2\n$USE && C=5\nrun a.b=$A c.d=$B e.f=$C',
    "words": 'ARGS="a.b=1   c.d=2"\nARGS="$ARGS e.f=3"\nrun $ARGS "$ARGS" x.y=$NOT_SET g.h=" i j "',
    "split in the middle": 'TWO=" a b "\nrun k.l=x$TWO"y z"$TWO',
    "empty": 'E=""\nrun $E "$E" a.b="$E" "$@" $@ $*',
    "single quotes": "N=5\nrun 'a.b=$N' \"c.d='$N'\" e.f=\\$N g.h='it'\\''s'",
    "arrays": 'LIST=(a.b=1 "c.d=x y")\nLIST+=(e.f=$((1 + 1)))\nrun "${LIST[@]}" n.n=${#LIST[@]} i.i=${LIST[1]} h.h=${LIST[-1]}',
    "defaults": 'run a.b=${A:-1} c.d=${B:=2} e.f=$B g.h=${B:+set} i.j=${C:+set} k.l=${D-"a b"} m.n=${#B}\n: "${A:=9}"\nrun a.b=$A',
    "changes of text": "M=Org/Model-7B\nrun a.b=${M##*/} c.d=${M%%-*} e.f=${M//\\//-} g.h=${M,,} i.j=${M%/*} k.l=${M/7B/8B}",
    "loop": 'for N in 1 2 "3 4"; do ARGS+=("k.n$N=$N"); run a.b=$N; done\nrun "${ARGS[@]}"',
    "case": "SIZE=7b\ncase $SIZE in\n  1b|2b) TP=1 ;;\n  7*) TP=2 ;;\n  *) TP=8 ;;\nesac\nrun a.b=$TP",
    "functions": 'start() {\n  local N=$1; shift\n  run a.b=$N "$@"\n}\nstart 4 c.d=5\nstart 8',
    "subshell": "A=1\n( A=2; run a.b=$A )\nrun a.b=$A\n{ A=3; run a.b=$A; }",
    "exit": 'if [[ "x" == "y" ]]; then exit 1; fi\nrun a.b=1\nexit 0\nrun a.b=2',
    "heredoc": "cat <<EOF > /dev/null\nrun a.b=1 'not closed\nEOF\nrun a.b=2 2>&1",
    "while": "while [ $# -gt 0 ]; do shift; done\nrun a.b=$#",
    "arguments": 'set -- a.b=1 "c.d=2 3"\nset -x\nrun "$@"',
    "numbers": "N=8\nif (( N % 2 == 0 )); then E=even; fi\nrun a.b=$E",
    "continued": "run a.b=1 \\\n  c.d=2 \\\n  \"e.f=long \\\ntext\"",
    "environment of a command": "N=2\nCUDA_VISIBLE_DEVICES=$N X=1 run a.b=1",
    "braces": "N=2\nrun a.b='{x:1,y:2}' \"c.d={z: $N}\" e.f={}",
}  # fmt: skip


@pytest.mark.parametrize("name", LIKE_BASH)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").write_text('#!/bin/sh\nprintf "%s\\1" "$@" >> words; printf "\\n" >> words\n')
    (tmp_path / "run").chmod(0o755)
    subprocess.run(
        ["bash", "-c", LIKE_BASH[name]],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        check=False,
    )
    real = (tmp_path / "words").read_text().removesuffix("\n").split("\1\n")
    real = [words.removesuffix("\1").split("\1") for words in real]
    started = [one for one in follow(LIKE_BASH[name]).started if "run" in one.words]
    found = [one.words[one.words.index("run") + 1 :] for one in started]
    assert [[word for word in words if word != "x.y=\ue000$NOT_SET\ue001"] for words in found] == [
        [word for word in words if word != "x.y="] for words in real
    ]
    assert not any(one.condition for one in started)


UNKNOWN = {
    "a command": ("A=$(nproc)\nrun a.b=$A c.d=1", {"a.b": ["$(nproc)"]}, ""),
    "what is in a file": ("if [ -f x ]; then A=1; else A=2; fi\nrun a.b=$A", {"a.b": ["$A"]}, ""),
    "a way that ends": ("if ! command -v nvcc; then exit 1; fi\nA=1\nrun a.b=$A", {}, ""),
    "started perhaps": ("if nvidia-smi; then run a.b=1; fi", {}, "if nvidia-smi ;"),
    "otherwise": ("test -e x || run a.b=1", {}, "not test -e x"),
    "read": ("read -r A\nrun a.b=$A", {"a.b": ["$A"]}, ""),
    "rounds": ("A=0\nwhile sleep 1; do A=1; done\nrun a.b=$A", {"a.b": ["$A"]}, ""),
    "an unknown choice": ("case $(hostname) in a) A=1 ;; esac\nrun a.b=1 c.d=${A:-0}", {"c.d": ["${A:-0}"]}, ""),
    "arithmetic of it": ("N=$(nproc)\nrun a.b=$((N * 2))", {"a.b": ["$((N * 2))"]}, ""),
    "bits": (
        "run a.b=$((2 ** 70)) c.d=$((1 / 0)) e.f=$((010))",
        {"a.b": ["$((2 ** 70))"], "c.d": ["$((1 / 0))"], "e.f": ["$((010))"]},
        "",
    ),
    "a loop that is left": ("for N in 1 2; do A=$N; [ -f x ] && break; done\nrun a.b=$A", {"a.b": ["$A"]}, ""),
    "text of printf": ("A=1\nprintf -v A %s x\nrun a.b=$A", {"a.b": ["$A"]}, ""),
    "a sum that is declared": ("declare -i A=2*3\nrun a.b=$A", {"a.b": ["$A"]}, ""),
    "further words": ("run a.b=1 $(more)", {"$(more)": ["$(more)"]}, ""),
    "braces": ("run a.b={1,2}", {"a.b": ["{1,2}"]}, ""),
    "the last word counts": ("run a.b=$(x) a.b=2 c.d=1 c.d=$(y)", {"c.d": ["$(y)"]}, ""),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_a_run_could_tell_is_not_guessed(name: str) -> None:
    script, unknown, condition = UNKNOWN[name]
    found = command_of(script, "run.sh")
    assert found.unknown == unknown
    assert found.condition == condition


def test_what_the_environment_may_set_is_told() -> None:
    script = 'N=${N:-4}\nif [ -z "$WANDB_API_KEY" ]; then echo "none"; fi\nsource .venv/bin/activate\nrun a.b=$N $EXTRA'
    found = command_of(script, "run.sh")
    assert found.words == ["run", "a.b=4"]
    assert found.assumed == ["EXTRA", "N", "WANDB_API_KEY"]
    assert found.unread == ["source .venv/bin/activate"]
    assert command_of("export $(cat .env)\nrun a.b=1", "run.sh").unread == ["export $(cat .env)"]


def test_nothing_is_run(tmp_path: Path) -> None:
    script = f"A=$(touch {tmp_path}/a)\ntouch {tmp_path}/b\n`touch {tmp_path}/c`\nrun a.b=1 c.d=$(touch {tmp_path}/d)"
    command_of(script, "run.sh")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "where", "line"),
    [
        ("if true; then run a.b=1", ":1", "if true; then run a.b=1"),
        ("A=1\n\n  run a.b=1 )\n", ":3", "run a.b=1 )"),
        ("cat <<E\nx\nE\nrun \\\n a.b=${X", ":5", "a.b=${X"),
        ("A=1\r\nrun a.b=$(x\r\n", ":2", "run a.b=$(x"),
        ("run a.b='1\n c.d=2", ":1", "run a.b='1"),
        ("A=1\nfor; do\n", ":2", "for; do"),
        ("case x in\n  a) run a.b=1", ":2", "a) run a.b=1"),
        ("A=(1\n2; 3)", ":2", "2; 3)"),
        ("A=\f\u2028\nrun a.b=1 )", ":2", "run a.b=1 )"),
        ("run a.b=${X:-'1}", "", ""),
        ("(" * 5000, "", ""),
        ("a=" + "${a:-" * 3000, ":1", ""),
    ],
)
def test_what_is_no_script_is_refused_with_its_line(text: str, where: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        command_of(text, "run.sh")
    assert str(error.value).startswith(f"run.sh{where}: not a shell script that can be read: ")
    assert str(error.value).endswith(line)


def test_growing_text_has_an_end() -> None:
    doubling = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60 + "run a.b=$A"
    assert len(follow(doubling).started[0].words[1]) < 500_000
