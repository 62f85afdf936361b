"""``rlvr sample``: what it prints, for people and for programs."""

import io
import json

import pytest

from rlvr_jax.cli.sample import main
from rlvr_jax.errors import ConfigError, WeightsError

MODEL = ["--model", "tiny-random", "--max-tokens", "8"]


def run_json(capsys, *argv):
    assert main([*MODEL, *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_prompt_and_one_answer_print_the_answer_alone(capsys, monkeypatch):
    [record] = run_json(capsys, "--prompt", "Hi")
    assert record["prompt"] == [{"role": "user", "content": "Hi"}]
    [answer] = record["answers"]
    assert main([*MODEL, "--prompt", "Hi"]) == 0
    assert capsys.readouterr().out == answer["text"] + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert main(MODEL) == 0
    assert capsys.readouterr().out == answer["text"] + "\n"


def test_several_answers_say_which_and_why_they_ended(capsys):
    records = run_json(capsys, "--prompt", "Hi", "--prompt", "Ho", "--num-samples", "2")
    assert [len(record["answers"]) for record in records] == [2, 2]
    texts = [answer["text"] for record in records for answer in record["answers"]]
    assert len(set(texts)) == 4
    assert main([*MODEL, "--prompt", "Hi", "--prompt", "Ho", "--num-samples", "2"]) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user\\nHo" in out
    answer = records[1]["answers"][0]
    assert f"[1/2: {answer['num_tokens']} tokens, {answer['stop_reason']}]\n{answer['text']}" in out


def test_the_seed_decides(capsys):
    texts = [
        run_json(capsys, "--prompt", "Hi", "--seed", seed)[0]["answers"][0]["text"]
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_are_of_each_token(capsys):
    [record] = run_json(capsys, "--prompt", "Hi", "--logprobs", "--temperature", "0.7")
    [answer] = record["answers"]
    logprobs = [token["logprob"] for token in answer["tokens"]]
    assert len(logprobs) == answer["num_tokens"] and all(value < 0 for value in logprobs)
    assert answer["logprob"] == pytest.approx(sum(logprobs), rel=1e-5)
    assert main([*MODEL, "--prompt", "Hi", "--logprobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{logprobs[0]:9.4f}" in lines[-len(logprobs)]


def test_a_stop_string_ends_an_answer(capsys):
    [record] = run_json(capsys, "--prompt", "Hi")
    text = record["answers"][0]["text"]
    stop = next(character for character in text if character != "\ufffd")
    [stopped] = run_json(capsys, "--prompt", "Hi", "--stop", stop)
    answer = stopped["answers"][0]
    assert answer["text"] == text[: text.index(stop) + 1]
    assert answer["stop_reason"] == "stop"


def test_conversations_come_from_files(capsys, tmp_path):
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "é?"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(turns) + "\n\n" + json.dumps({"messages": turns[1:]}) + "\n")
    records = run_json(capsys, "--chat", str(path))
    assert [record["prompt"] for record in records] == [turns, turns[1:]]


@pytest.mark.parametrize("line", ["{", "3", "[]", '[{"content": "x"}]', '{"messages": "x"}'])
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    path = tmp_path / "chats.jsonl"
    path.write_text('[{"role": "user", "content": "a"}]\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2 is"):
        main([*MODEL, "--chat", str(path)])


def test_nothing_to_answer_and_nobody_to_answer(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(ConfigError, match="no prompt; give --prompt"):
        main(MODEL)
    with pytest.raises(ConfigError, match="no model; give --model"):
        main(["--prompt", "x"])
    with pytest.raises(WeightsError, match="no model 'nothing'"):
        main(["--prompt", "x", "--model", "nothing"])
    with pytest.raises(SystemExit):
        main([*MODEL, "--prompt", "x", "--mesh", "2,2"])
