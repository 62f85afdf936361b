"""``rlvr tasks``: what it prints, what it judges, and how it refuses."""

import json
import sys

import pytest

from rlvr_jax.cli.tasks import main
from rlvr_jax.errors import ConfigError
from rlvr_jax.tasks.registry import DOMAINS
from rlvr_jax.tasks.splits import draw


def run_json(capsys, *argv: str):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_gives_every_domain_with_its_facts(capsys):
    domains = {domain["name"]: domain for domain in run_json(capsys, "list")}
    assert set(domains) == set(DOMAINS)
    add = domains["arithmetic/add"]
    assert (add["num_levels"], add["verifiers"], add["licence"]) == (6, ["numeric"], "Apache-2.0")


def test_list_takes_a_prefix_or_a_group(capsys):
    assert {d["name"] for d in run_json(capsys, "list", "text/f")} == {
        "text/first_word",
        "text/first_letter",
    }
    assert run_json(capsys, "list", "math") == run_json(capsys, "list", "arithmetic")
    with pytest.raises(ValueError, match="unknown domain 'zzz'"):
        main(["list", "zzz"])


def test_list_for_people_says_what_is_left_out(capsys):
    assert main(["list", "rg"]) == 0
    out = capsys.readouterr().out
    assert "rg/chain_sum" in out and "left out: rg/codeio: it runs program text" in out


def test_show_prints_the_tasks_that_training_draws(capsys):
    shown = run_json(
        capsys,
        "show",
        "text/last_word",
        "--level",
        "2",
        "-n",
        "3",
        "--split",
        "held_out",
        "--seed",
        "4",
    )
    drawn = [draw("text/last_word", 2, "held_out", 4, index) for index in range(3)]
    assert [task["id"] for task in shown] == [task.id for task in drawn]
    assert main(["show", "text/last_word", "--level", "2"]) == 0
    out = capsys.readouterr().out
    assert "text/last_word level 2 train seed 0 index 0" in out
    assert "user: What is the last word of:" in out


def test_show_gives_one_task_a_level_by_default(capsys):
    assert [task["metadata"]["level"] for task in run_json(capsys, "show", "arithmetic/mul")] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_score_judges_a_redrawn_task(capsys):
    where = ["arithmetic/add", "--level", "3", "--split", "held_out", "--seed", "2", "--index", "5"]
    task = draw("arithmetic/add", 3, "held_out", 2, 5)
    right = run_json(capsys, "score", *where, "--response", task.answer)
    assert (right["score"], right["task"]["id"]) == (1.0, task.id)
    assert [(v["name"], v["status"], v["value"]) for v in right["verdicts"]] == [
        ("numeric", "ok", 1.0)
    ]
    assert main(["score", *where, "--response", "no idea"]) == 0
    assert "numeric: ok  value 0  weight 1" in capsys.readouterr().out


def test_score_takes_what_show_prints(capsys, tmp_path):
    shown = run_json(capsys, "show", "rg/chain_sum", "--level", "1")
    path = tmp_path / "task.json"
    path.write_text(json.dumps(shown))
    response = f"<answer>{shown[0]['answer']}</answer>"
    result = run_json(
        capsys, "score", "rg/chain_sum", "--task-file", str(path), "--response", response
    )
    assert result["score"] == 1.0
    assert result["task"] == shown[0]


def test_score_takes_a_question_and_an_answer(capsys):
    task = json.dumps({"prompt": "What is 7 + 5?", "answer": "12"})
    result = run_json(capsys, "score", "arithmetic/add", "--task", task, "--response", "12")
    assert result["score"] == 1.0
    assert result["task"]["prompt"] == [{"role": "user", "content": "What is 7 + 5?"}]


def test_score_with_any_verifier(capsys, monkeypatch):
    ask = ["score", "--verifier", "numeric", "--answer", "0.5"]
    assert run_json(capsys, *ask, "--response", "so it is 1/2")["score"] == 1.0
    whole = ["--params", '{"mode": "whole"}']
    assert run_json(capsys, *ask, *whole, "--response", "so it is 1/2")["score"] == 0.0
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"read": lambda self: "it is 0.5"})())
    assert run_json(capsys, *ask, "--response", "-")["score"] == 1.0


def test_a_verifier_that_cannot_judge_is_not_a_zero(capsys):
    assert (
        main(["score", "--verifier", "numeric", "--answer", "many", "--response", "5", "--json"])
        == 1
    )
    result = json.loads(capsys.readouterr().out)
    assert result["score"] is None
    assert result["verdicts"][0]["status"] == "failed"
    assert main(["score", "--verifier", "numeric", "--answer", "many", "--response", "5"]) == 1
    assert "score: none (a verifier could not judge)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["score", "--response", "5"], "no verifiers; give DOMAIN"),
        (["score", "--verifier", "numeric", "--response", "5"], "no task; give DOMAIN"),
        (["score", "arithmetic/add", "--response", "5", "--task", "{"], "--task is not JSON"),
        (
            ["score", "arithmetic/add", "--response", "5", "--task", "[1, 2]"],
            "expected an object with 'prompt'",
        ),
        (
            [
                "score",
                "arithmetic/add",
                "--response",
                "5",
                "--task",
                '{"domain": "text/copy", "answer": "5"}',
            ],
            "--task is of domain 'text/copy', and 'arithmetic/add' was asked for",
        ),
        (
            [
                "score",
                "arithmetic/add",
                "--response",
                "5",
                "--task",
                '{"prompt": [1], "answer": "5"}',
            ],
            r"has the prompt \[1\]; expected text, or a list of messages",
        ),
        (
            ["list", "--import", "no_such_module_here"],
            "--import no_such_module_here: No module named",
        ),
    ],
)
def test_bad_input_is_a_clear_error(argv, message):
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_domains_of_ones_own_are_imported(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(DOMAINS, "_entries", dict(DOMAINS._entries))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_domains.py").write_text(
        "from rlvr_jax.tasks import Draft, VerifierUse, ask, domain\n"
        "@domain('own/echo', description='echo', num_levels=1, verifiers=(VerifierUse(name='exact'),),\n"
        "        max_response_tokens=4)\n"
        "def echo(level, rng):\n"
        "    word = str(rng.integers(100))\n"
        "    return Draft(prompt=ask(f'Say {word}', system=''), answer=word)\n"
    )
    assert run_json(capsys, "list", "own", "--import", "my_own_domains")[0]["description"] == "echo"
    task = draw("own/echo", 0, "train", 0, 0)
    assert run_json(capsys, "score", "own/echo", "--response", task.answer)["score"] == 1.0
    sys.modules.pop("my_own_domains")


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "rlvr tasks score" in capsys.readouterr().out
