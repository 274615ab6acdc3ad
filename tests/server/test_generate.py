import json
from types import SimpleNamespace
from typing import ClassVar

import pytest

import server.llm
from server.errors import bad_request
from server.generate import main


class FakeLLM:
    """Answers a prompt with itself in capitals; refuses "bad"."""

    configs: ClassVar[list] = []

    def __init__(self, *, config, progress):
        self.configs.append(config)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def answers(self, bodies):
        for body in bodies:
            if body.get("prompt") == "bad":
                yield bad_request("no such prompt", "prompt")
            elif "messages" in body:
                yield {"choices": [{"message": {"content": body["messages"][0]["content"].upper()}}], "asked": body}
            else:
                yield {"choices": [{"text": body["prompt"].upper()}], "asked": body}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(server.llm, "LLM", FakeLLM)
    FakeLLM.configs = []
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(*flags):
        status = main([str(source), "--output", str(target), *flags])
        written = target.read_text() if target.exists() else ""
        return status, [json.loads(line) for line in written.splitlines()]

    return SimpleNamespace(source=source, target=target, run=run)


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))


def test_every_line_gets_a_line_in_order(files):
    write(
        files.source,
        '{"prompt": "one", "custom_id": "a"}',
        '{"messages": [{"role": "user", "content": "two"}]}',
    )
    status, lines = files.run()
    assert status == 0
    assert [(line["index"], line["text"], line.get("custom_id")) for line in lines] == [
        (0, "ONE", "a"),
        (1, "TWO", None),
    ]


def test_a_bad_line_becomes_an_error_and_ends_nothing(files, capsys):
    write(files.source, '{"prompt": "one"}', "{", "[1]", '{"n": 1}', '{"prompt": "bad"}', "", '{"prompt": "six"}')
    status, lines = files.run()
    assert status == 1
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line.get("text") for line in lines] == ["ONE", None, None, None, None, "SIX"]
    assert lines[4]["error"]["param"] == "prompt"
    assert "4 of 6 lines" in capsys.readouterr().err


def test_params_fill_in_and_lines_win(files):
    write(files.source, '{"prompt": "x"}', '{"prompt": "y", "max_tokens": 2}')
    _, lines = files.run("--params", '{"max_tokens": 1, "temperature": 0}')
    assert [line["response"]["asked"]["max_tokens"] for line in lines] == [1, 2]
    assert [line["response"]["asked"]["temperature"] for line in lines] == [0, 0]


def test_a_file_is_not_overwritten_by_accident(files, capsys):
    write(files.source, '{"prompt": "x"}')
    files.target.write_text("precious\n")
    assert main([str(files.source), "--output", str(files.target)]) == 2
    assert files.target.read_text() == "precious\n"
    assert "--resume" in capsys.readouterr().err
    status, lines = files.run("--overwrite")
    assert (status, len(lines)) == (0, 1)


def test_an_interrupted_run_is_taken_up_after_its_last_whole_line(files):
    write(files.source, *(f'{{"prompt": "{word}"}}' for word in ("one", "two", "three")))
    _, whole = files.run()
    files.target.write_text("".join(json.dumps(line) + "\n" for line in whole[:1]) + '{"index": 1, "te')
    status, lines = files.run("--resume")
    assert (status, lines) == (0, whole)


def test_flags_of_the_engine_reach_it(files):
    write(files.source, '{"prompt": "x"}')
    files.run("--model", "org/name", "--dtype", "float32")
    assert (FakeLLM.configs[0].model, FakeLLM.configs[0].dtype) == ("org/name", "float32")


@pytest.mark.parametrize("flags", [["--params", "{"], ["--params", "[]"], ["--dtype", "int3"]])
def test_wrong_usage_is_one_line_and_status_2(files, capsys, flags):
    write(files.source, '{"prompt": "x"}')
    assert main([str(files.source), *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_missing_input_is_one_line_and_status_2(tmp_path, capsys):
    assert main([str(tmp_path / "nothing.jsonl")]) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
