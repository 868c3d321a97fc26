"""What the documentation tells people to type is typed here, in a directory that holds what it names; what it tells
them to open is there.
"""

import ast
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from documented import GUIDE, GUIDES, MODULES, ROOT, commands, docstrings, fenced, paths
from refusals import tells
from training_processes import CONTEXT
from written_tokenizers import written

from meshtrain.config import Config, load
from meshtrain.config.key import keys
from meshtrain.probe import devices, links

COMMANDS = commands()
# What cannot be typed here, and why.
NOT_HERE = {
    "pip install -e .": "the tests run in an environment that has it",
    "pip install -e .[test]": "likewise",
    "pip install -e .[cuda12]": "5.5 GB, for machines with a GPU",
    "pip install -e .[gpu]": "likewise",
    "pip install -e .[data]": "a test installs nothing",
    "pip install -e .[adopt,chat]": "likewise",
    "pip install -e .[evaluate]": "likewise",
    "pip install -e .[notebooks]": "likewise",
    "pip install -e .[serve]": "likewise",
    "pip install -e .[vision]": "likewise",
    "pip install -e .[dev]": "likewise",
    "pip install -e .[docs]": "likewise",
    "pip install -c constraints.txt -e .": "likewise",
    "mkdocs build --strict": "tests/test_site.py builds the pages, and follows every link",
    "jupyter lab experiments": "opens a browser; CI executes the notebooks",
    "python -m meshtrain.evaluate HF_DIR --tasks hellaswag,gsm8k --limit 100": "downloads them; "
    "tests/evaluate/test_harness.py has tasks of its own",
    "python -m meshtrain.evaluate.harness": "needs lm-eval",
    "python -m meshtrain.plan --jobs configs/jobs/llama.yaml --cluster h100": "tests/plan/jobs/test_jobs_command.py "
    "places them",
    "python -m meshtrain.probe --output cluster.yaml": "takes two minutes; tests/probe/test_probe_command.py does all "
    "of it on fake devices",
    "python -m meshtrain COMMAND": "stands for each of them",
    "python -m meshtrain.plan --search": "names an option; tests/plan/test_plan_command.py gives it with a config",
    "python -m meshtrain.plan --csv": "likewise",
    "python -m meshtrain.report runs/moe_quickstart --html report.html": "needs a run of two minutes; "
    "tests/report/test_expert_loads.py has one",
    "python -m meshtrain.plan --measure": "takes a minute; tests/plan/test_plan_command.py reads what it prints",
    "python -m meshtrain.train --config configs/vit_digits.yaml": "takes minutes; tests/test_images_runs.py has runs "
    "on images",
    "python -m meshtrain.generate HF_DIR --chat": "reads what is typed; tests/generate/test_generate_command.py has it",
    "python -m meshtrain.adopt export RUN PEFT_OUT --adapter": "the run has no adapters; tests/adopt has runs that do",
    "python -m meshtrain.adopt merge RUN HF_OUT": "likewise",
    "python -m meshtrain.survive inject kill@40:1 RUN": "needs a run that goes on; tests/survive/test_inject.py has "
    "some",
    "python -m meshtrain.probe --mesh data=8,islands=2 --algorithms all --html probe.html": "takes minutes; "
    "tests/probe/test_measure.py measures algorithms",
    "python tests/helpers/house.py": "tests/test_house.py limits the figures that it prints",
    "srun python -m meshtrain.train": "a row of measurements; tests/launch/test_slurm_cluster.py has srun do so",
    "python -m meshtrain.sweep --config FILE --over optimizer.learning_rate=1e-3,3e-3 --over model.layers=2,4": "four "
    "runs; tests/test_sweep.py has two",
    "python -m meshtrain.sweep --config FILE --over KEY=A,B": "likewise",
    "python -m meshtrain.check_gpu.child NAME...": "the command starts it; tests/check_gpu has both",
    "srun meshtrain train --config FILE": "likewise, where Slurm is installed",
    "python -m meshtrain.serve RUN": "serves until it is told to end; tests/serve/ has it",
    "python -m meshtrain.serve RUN --draft": "likewise",
    "python -m meshtrain.adopt export RUN HF_OUT --dtype float8": "for DeepSeek's class; "
    "tests/hf_families/test_deepseek.py writes such files",
    "python -m meshtrain.generate RUN --prompt def main( --prompt import  --tokens 100 --draft": "needs a run with model.mtp; "
    "tests/generate/test_drafting.py has one",
    "python -m meshtrain.serve RUN --cache 64 --cache-seconds 3600": "likewise",
    "python -m meshtrain.serve RUN_A RUN_B --resident 1": "likewise",
    "python -m meshtrain.generate Qwen/Qwen3-0.6B --prompt TEXT": "downloads it; tests/test_hub.py has a hub of its own",
    "python -m meshtrain.adopt push HF_OUT ORG/NAME --private": "needs an account; tests/test_hub.py has a hub of its own",
    "python -m meshtrain.serve RUN --weights int8": "likewise",
    "python -m experiments.serving.weights": "trains for minutes; tests/evaluate/test_weights.py evaluates a model in "
    "each way",
}
# Those of docs/result.md: a model that is trained, exported and trained on.
RESULT = [
    name
    for name in COMMANDS
    if re.search("(configs|runs)/python|python-tokenizer", name)
]
# The thread of docs/fine-tuning.md, from a row of data to a model that was exported and answers.
OF_CHATS = re.compile("README|base|chats|capitals")
THREAD = [name for name in COMMANDS if OF_CHATS.search(name) and name not in RESULT]
# Those of docs/reinforcement.md: runs that draw answers, looked at.
REWARDED = [name for name in COMMANDS if "rl_arithmetic" in name]
IN_ORDER = [*THREAD, *REWARDED, *RESULT]
NOT_HERE |= dict.fromkeys(IN_ORDER, "typed in their order by a test of their own")
# Its file of a reward, an environment and what is added up.
GUIDE_OF_REWARDS = fenced(GUIDES["docs/reinforcement.md"])
OF_REWARDS = "\n\n".join(
    block
    for kind, block in GUIDE_OF_REWARDS
    if kind == "py" and "import numpy" not in block
)
# Whole test files are part of the tests, and experiments take minutes to hours: tests/test_experiments.py has each of
# them tell its options.
ELSEWHERE = re.compile(r"python (-m pytest|-m experiments\.|experiments/)")
# A synopsis stands for several commands.
FORMS = {
    "python -m meshtrain.checkpoint ls | show | verify | diff": [
        "python -m meshtrain.checkpoint ls RUN",
        "python -m meshtrain.checkpoint show RUN",
        "python -m meshtrain.checkpoint verify RUN",
        "python -m meshtrain.checkpoint diff RUN RUN",
    ],
    "python -m meshtrain.generate RUN [--prompt TEXT | --chat]": [],
    "python -m meshtrain.telemetry catalogue|dashboard|rules": [],
    "python -m meshtrain.keys [KEY]": ["python -m meshtrain.keys mesh.data"],
    # Needs shtab; tests/test_cli.py has it complete
    "python -m meshtrain.completion bash|zsh": [],
    "python -m meshtrain.adopt inspect | import | export | merge | push | config": [],
}
HF_DIR = str(ROOT / "tests" / "adopt" / "golden" / "llama3")
PLACEHOLDERS = {
    "FILE": "mine.yaml",
    "RUN": "runs/quickstart",
    "TEXT...": "my_text/",
    "HF_DIR": HF_DIR,
    "HF_OUT": "exported",
    "IMPORTED": "imported",
    "THEIRS": "theirs.yaml",
}
# What is the same with the placeholders filled in is typed once.
TYPED = list(
    {
        " ".join(PLACEHOLDERS.get(word, word) for word in form.split()): form
        for command in COMMANDS
        if command not in NOT_HERE and not ELSEWHERE.match(command)
        for form in FORMS.get(command, [command])
    }.values()
)
# What may say how something is installed, and an extra of the name that the package index has given to others.
ROOMS = ("meshtrain", "docs", "configs", "experiments", "tests/helpers")
TEXTS = (".py", ".md", ".yaml", ".json", ".ipynb")
WIDEST = 110  # characters of a line of code, of which a window of 1,400 px shows 112
BY_NAME = re.compile(r"\bmeshtrain\[[a-z]|pip install (-\S+ )*meshtrain\b")
PLACEHOLDER = re.compile(r"[A-Z]{2,}(\.\.\.)?")
FILE = {
    "run": {"directory": "runs/mine", "fake_devices": 8},
    "model": {"layers": 2, "d_model": 32, "heads": 4, "d_ff": 32, "vocab_size": 260},
    "mesh": {"pipeline": 2},
    "data": {"source": "my_text/"},
    "train": {"global_batch_size": 4},
}
THEIRS = {
    "model_name_or_path": HF_DIR,
    "stage": "sft",
    "finetuning_type": "lora",
    "dataset": "chats",
    "lora_rank": 8,
}
TOKENIZER = "python -m meshtrain.data train-tokenizer --input my_text/ --vocab-size 300 --output tokenizer.json"
PREPARE = "python -m meshtrain.data prepare --input my_text/ --tokenizer byte --output shards/ --validation 0.2"
MADE_BY = {
    "tokenizer.json": TOKENIZER,
    "data.source=shards/": PREPARE,
}  # what commands name that others make
# A run that is as documented, but short; the others are quick.
SUPERVISED = "python -m meshtrain.survive --config mine.yaml"
SHORT_RUN = ["--set", "train.steps=2", "--set", "train.sequence_length=32"]
SHORTER = {
    "meshtrain.train": SHORT_RUN,
    "meshtrain.launch": SHORT_RUN,
    "meshtrain.survive": SHORT_RUN,
}
# Commands whose first word is a command too: named alone it is looked at.
OF_MANY = (
    "meshtrain.adopt",
    "meshtrain.checkpoint",
    "meshtrain.data",
    "meshtrain.launch",
)
QUICKSTART = next(command for command in COMMANDS if "meshtrain.train" in command)
# What each prints, by the first that it contains.
SAYS = {
    "--help": r"usage: python -m meshtrain",
    "meshtrain.keys": r"(?m)^  takes     a whole number, at least 1$",
    "--version": r"^meshtrain \d",
    "--gantt": r"\A\Z",  # only the file's name is said, on stderr
    "--csv": r"\A\Z",
    "--search": r"legal layouts on 8 devices, (?s:.*)\n 1 +\d",
    "--print-config": r"(?m)^model:\n  family: llama\n",
    "meshtrain.launch local": r"n0: step 2/2  loss",
    "meshtrain.launch slurm": r"(?m)^#SBATCH --nodes=2$",
    "meshtrain.survive --config": r"step 2/2  loss",
    "meshtrain.survive status": r"^over, exit code 0: the run is done",
    "meshtrain.survive stats": r"goodput \d",
    "meshtrain.survive inject": r"(?m)^ 6 kill ",
    "meshtrain.generate": r"(?s)^.{3,}\n$",
    "meshtrain.train": r"step 2/2  loss \d\.\d{4}  [\d,]+ tokens/s",
    "meshtrain.monitor": r"^quickstart: done  step 2/2  loss \d",
    "meshtrain.report": r"done, all 2 steps(?s:.*)\nWhere the time went",
    "telemetry catalogue": r"(?m)^meshtrain_loss +step",
    "telemetry dashboard": r'(?m)^ "title": "meshtrain"',
    "telemetry rules": r"(?m)^- name: meshtrain",
    "probe --only pairs": r"(?s)latency in µs, from row to column.*bandwidth in GB/s",
    "meshtrain.probe": r"(?s)latency.*each of 8 devices, all at once",
    "adopt inspect": r"(?m)^model:\n  family: llama\n  layers: 3\n",
    "adopt import": r"imported",
    "adopt export": r"parameters in \w+, of step 2$",
    "adopt config": r"(?m)^lora: ",
    "--flags": r"(?m)^launch sets nothing\n(?s:.*)left alone, whatever older advice says",
    "evaluate runs/quickstart --text": r"(?m)^documents +3\ntokens +[\d,]+\n(?s:.*)^bits per byte +\d\.\d{6}$",
    "meshtrain.evaluate": r"^stdlib: [\d,]+ held-out tokens\neval loss +\d\.\d{6}\n",
    "meshtrain.plan": r"a device: fits *\n(?s:.*)each device holds",
    "meshtrain.data prepare": r"tokens \(uint16\) in 1 shards",
    "meshtrain.data train-tokenizer": r"tokenizer\.json",
    "meshtrain.checkpoint ls": r"step +saved +loss(?s:.*)\n +2  \d{4}-",
    "meshtrain.checkpoint show": r"step 2 in (?s:.*)\nversions: python",
    "meshtrain.checkpoint verify": r"2: intact",
    "meshtrain.checkpoint diff": r"the same",
}


def environment() -> dict[str, str]:
    """Of what is typed: it finds the tests' compiled programs, and fakes the devices that its config asks for."""
    return {
        name: value for name, value in os.environ.items() if name != "PJRT_NPROC"
    } | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }


def typed(words: list[str], directory: Path) -> str:
    """What `python -m words` prints that is typed in a directory: in a process forked from one that has imported what
    most need.
    """
    printed = directory / "printed"
    process = CONTEXT.Process(
        target=_type, args=(words, directory, printed, environment())
    )
    process.start()
    process.join(300)
    assert process.exitcode == 0, Path(f"{printed}.errors").read_text()
    return printed.read_text()


def _type(
    words: list[str], directory: Path, printed: Path, variables: dict[str, str]
) -> None:
    for number, path in ((1, printed), (2, f"{printed}.errors")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    # A probe as documented, but of less: a program is compiled for each size.
    devices.SIDES["cpu"], devices.ELEMENTS["cpu"] = 64, 2**12
    links.SIZES["cpu"] = links.PAIR_SIZES["cpu"] = (2**12, 2**16)
    jax.config.update(
        "jax_compilation_cache_dir", variables["JAX_COMPILATION_CACHE_DIR"]
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def run(words: list[str], directory: Path) -> None:
    """Types a command in a directory, with nothing changed but SHORTER; what it must print and write is there."""
    named = len(words) == 3 or (len(words) == 4 and words[2] in OF_MANY)
    more = (
        SHORTER.get(words[2], [])
        if "--config" in words
        else ["--help"]
        if named
        else []
    )
    printed = typed([*words[2:], *more], directory)
    line = " ".join([*words, *more])
    expected = next(said for word, said in SAYS.items() if word in line)
    assert re.search(expected, printed), printed
    for option, target in pairwise(words):
        assert (
            option not in ("--csv", "--gantt", "--html", "--output", "--svg")
            or (directory / target).exists()
        ), f"nothing at {target}"


def furnish(directory: Path) -> Path:
    """Puts what commands name into a directory, but for a run."""
    shutil.copytree(ROOT / "configs", directory / "configs")
    (directory / "experiments").mkdir()
    (directory / "my_text").mkdir()
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        (directory / "my_text" / f"{name}.txt").write_bytes((ROOT / name).read_bytes())
    (directory / "mine.yaml").write_text(yaml.safe_dump(FILE))
    (directory / "theirs.yaml").write_text(yaml.safe_dump(THEIRS))
    return directory


@pytest.fixture
def directory(tmp_path):
    return furnish(tmp_path)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The run directory that a command left which several others read; it is typed once."""

    @cache
    def run_of(command: str) -> Path:
        where = furnish(tmp_path_factory.mktemp("ran"))
        run(COMMANDS.get(command, command.split()), where)
        return where / "runs"

    return run_of


@pytest.mark.thorough
@pytest.mark.parametrize("command", TYPED)
def test_what_is_documented_can_be_typed(command, directory, ran):
    words = [
        PLACEHOLDERS.get(word, word) for word in COMMANDS.get(command, command.split())
    ]
    assert words[0] == "python", "not Python: give a reason in NOT_HERE"
    assert not (unknown := list(filter(PLACEHOLDER.fullmatch, words))), (
        f"no such thing is made here: {unknown}"
    )
    for made, by in MADE_BY.items():
        if any(word.endswith(made) for word in words) and words != by.split():
            run(by.split(), directory)
    once = (
        SUPERVISED if words[2] == "meshtrain.survive" and len(words) > 4 else QUICKSTART
    )
    if once in (" ".join(words), command):
        ran(once)
    else:
        if "runs/quickstart" in words:
            (directory / "runs").symlink_to(ran(once))
        run(
            [
                "runs/mine"
                if once == SUPERVISED and word == "runs/quickstart"
                else word
                for word in words
            ],
            directory,
        )
    # What the README shows is what its command draws now.
    for drawn in directory.glob("experiments/*.svg"):
        assert drawn.read_text() == (ROOT / "experiments" / drawn.name).read_text(), (
            "draw it again"
        )


@pytest.mark.thorough
def test_the_thread_of_fine_tuning_ends_in_an_exported_model(directory):
    *thread, chat = THREAD
    assert len(thread) == 6 and chat.endswith("generate capitals --chat")
    shutil.copy(ROOT / "README.md", directory)
    for command in thread:
        words = COMMANDS[command][2:]
        short = ["--set", "train.steps=2"] if words[0] == "meshtrain.train" else []
        printed = typed([*words, *short], directory)
        assert "show" not in words or tells(printed, "learned"), printed
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (directory / "capitals" / file).exists(), file


@pytest.mark.thorough
def test_the_trained_model_of_the_guide_is_exported_and_trained_on(directory):
    short = ["--set", "train.steps=2"]
    assert len(RESULT) == 9
    for command in RESULT:
        words = COMMANDS[command][2:]
        if words[0].startswith("experiments"):
            continue  # a hundred answers: half a minute
        trains = words[0] == "meshtrain.train"
        if words[0] == "meshtrain.evaluate":
            if not find_spec("lm_eval"):
                continue
            words = [*words, "--limit", "2"]
        printed = typed([*words, *(short if trains else [])], directory)
        assert not trains or "step 2/2" in printed, printed
        assert words[0] != "meshtrain.evaluate" or re.search(
            r"parses +\|↑ +\|", printed
        ), printed
    rows = (directory / "runs/python_rl/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["rl/rewards_failed"] for row in rows] == [0, 0]


def test_the_guides_rewards_of_python_pay_for_code_that_parses():
    rewards = runpy.run_path(str(ROOT / "configs/python/parses.py"))
    answers = {
        "\n    a = 1\n    return a\n": (1, 0.5, 0),
        "\n    a = 1\n    a = 1\n": (1, 0.25, 0.5),
        "\n    # no more\n": (0, 0, 0),
        "\n    return (\n": (0, 0, 0),
        '\n    """Text."""\n': (1, 0, 0),
        f"\n    return 1\n    {'x' * 300}\n": (1, 0.25, 0),
    }
    for answer, expected in answers.items():
        paid = [
            rewards[name]("def f():", answer) for name in ("parses", "code", "repeats")
        ]
        assert paid == list(expected), answer
        scores = rewards["process_results"]({"prompt": "def f():"}, [answer])
        assert scores == {"parses": expected[0], "statements": 4 * expected[1]}


@pytest.mark.thorough
def test_the_guides_reward_scores_answers_and_its_runs_are_looked_at(directory):
    (directory / "mine.py").write_text(OF_REWARDS)
    short = ["--set", "train.steps=2", "--set", "rl.supervised=0"]
    assert len(REWARDED) == 7
    for command in REWARDED:
        words = COMMANDS[command][2:]
        printed = typed(
            [*words, *(short if words[0] == "meshtrain.train" else [])], directory
        )
        assert "step 2/2" in printed or tells(printed, "done, all 2 steps"), printed
    for run in ("rl_arithmetic", "mine", "brief", "distilled", "ahead"):
        rows = (directory / "runs" / run / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["rl/rewards_failed"] for row in rows] == [0, 0]
    assert "<h2>Answers</h2>" in (directory / "report.html").read_text()


def test_the_guides_environment_tells_how_far_off_a_guess_is():
    names: dict[str, Any] = {}
    exec(OF_REWARDS, names)
    guess = names["Guess"]({"answer": "42"})
    hints = [
        guess.step([{"role": "assistant", "content": said}])
        for said in ("7", "99", "?")
    ]
    assert [hint[0]["content"] for hint in hints] == [
        "It is higher.",
        "It is lower.",
        "Give a number.",
    ]
    assert guess.step([{"role": "assistant", "content": "It must be 42."}]) is None


TOLD = """

class Told(Guess):
    def step(self, messages):
        replies = super().step(messages)
        with open({!r}, "a") as file:
            print(replies, file=file)
        return replies
"""


@pytest.mark.thorough
def test_the_guides_config_of_several_turns_is_trained(directory):
    kinds = dict(reversed(GUIDE_OF_REWARDS))
    config = yaml.safe_load(kinds["yaml"])
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    special = ("<|im_start|>", "<|im_end|>")
    tokenizer = written(
        directory / "chat", special, tokenizer_config={"chat_template": template}
    )
    config |= {
        "model": {**FILE["model"], "vocab_size": 303},
        "data": {"tokenizer": str(tokenizer)},
    }
    config["train"] |= {"steps": 2, "global_batch_size": 16, "sequence_length": 256}
    # of so many tokens by random weights one in five answers has an end
    config["rl"] |= {"answers": 64, "environment": "mine:Told"}
    (directory / "c.yaml").write_text(yaml.safe_dump(config))
    told = directory / "told"
    (directory / "mine.py").write_text(OF_REWARDS + TOLD.format(str(told)))
    prompt = next(
        block
        for kind, block in GUIDE_OF_REWARDS
        if kind == "jsonl" and "Guess" in block
    )
    (directory / "guess.jsonl").write_text(prompt * 2)
    printed = typed(["meshtrain.train", "--config", "c.yaml"], directory)
    assert "step 2/2" in printed
    rows = (directory / "runs" / "guess" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["rl/rewards_failed"] for row in rows] == [0, 0]
    assert "user" in told.read_text()


def test_what_is_not_typed_here_is_documented():
    assert len(COMMANDS) > 10
    assert NOT_HERE.keys() | FORMS.keys() <= COMMANDS.keys()


BLOCKS = fenced(GUIDE)
# tests/test_library.py runs the one of the library.
PYTHON = [
    block
    for kind, block in BLOCKS
    if kind == "python" and f"## As a library\n\n```python\n{block}" not in GUIDE
]


@pytest.mark.thorough
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.splitlines()[-1])
def test_the_guides_python_runs_and_shows_its_last_line(block, directory):
    last = ast.parse(block).body[-1]
    assert isinstance(last, ast.Expr), "a cell ends on an expression"
    script = [sys.executable, "-c", f"{block}\nprint({ast.unparse(last)})"]
    ended = subprocess.run(
        script,
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) > 3


def test_the_guides_blocks_are_of_kinds_that_are_run_or_shown():
    assert {kind for kind, _ in BLOCKS} == {
        "",
        "bash",
        "jsonl",
        "py",
        "python",
        "sh",
        "text",
        "yaml",
    }


# That of the file in docs/extending.md is trained by the test after it.
@pytest.mark.parametrize(
    "block",
    [block for kind, block in BLOCKS if kind == "yaml" and "imports:" not in block],
)
def test_the_guides_configs_are_configs(block):
    config = load(
        yaml.safe_load(
            block.replace("Llama-3.1-8B", HF_DIR).replace("s3://bucket/llama", HF_DIR)
        )
    )
    if "lora:" in block:
        assert (
            config.model.layers == 3
            and config.lora.rank == 16
            and config.data.batching == "packed"
        )
    if "islands:" in block:
        assert config.mesh.islands > 1 and config.mesh.shards > 1
    assert len(PYTHON) == sum(kind == "python" for kind, _ in BLOCKS) - 1


@pytest.mark.thorough
def test_the_guides_file_of_parts_is_trained_by_its_config(directory):
    blocks = fenced(GUIDES["docs/extending.md"])
    parts = "\n\n".join(block for kind, block in blocks if kind == "py")
    (directory / "mine.py").write_text(parts)
    (directory / "c.yaml").write_text(
        next(block for kind, block in blocks if kind == "yaml")
    )
    printed = typed(
        ["meshtrain.train", "--config", "c.yaml", "--set", "train.steps=2"], directory
    )
    assert re.search(
        r"relu_llama .* data 2 x tensor 2 x pipeline 2(?s:.*)step 2/2", printed
    ), printed
    assert (directory / "runs/mine/imports/mine.py").read_text() == parts


def test_messages_of_the_troubleshooting_page_are_said():
    sources = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in MODULES)
    messages = [
        block
        for kind, block in fenced(GUIDES["docs/troubleshooting.md"])
        if kind == "text"
    ]
    fragments = [
        part.strip()
        for block in messages
        for line in block.splitlines()
        for part in line.split("…")
    ]
    assert len(fragments) > 20
    assert [fragment for fragment in fragments if fragment not in sources] == []


@pytest.mark.thorough
def test_every_path_that_is_named_is_there():
    found = list(paths())
    assert len(found) > 50
    assert not [
        f"{where}: {path.relative_to(ROOT)}"
        for where, path in found
        if not path.exists()
    ]


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    head, *rest = name.split(".")
    try:
        thing: Any = importlib.import_module(head)
    except ImportError:
        return False
    for part in rest:
        if not hasattr(thing, part):
            try:
                importlib.import_module(f"{thing.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        thing = getattr(thing, part)
    return True


@pytest.mark.thorough
def test_every_module_that_a_package_names_is_there():
    named = {
        (path.parent.relative_to(ROOT).as_posix(), name)
        for path, _, text in docstrings()
        if path.name == "__init__.py"
        for name in [
            *re.findall(r"`(\w+(?:\.\w+)+)`", text),
            *re.findall(r"\bmeshtrain(?:\.\w+)+", text),
        ]
    }
    assert len(named) > 50
    known = keys(Config)
    wrong = [
        f"{where}: {name}"
        for where, name in named
        if name not in known
        and not any(
            map(resolves, (re.sub("^mt\\.", "meshtrain.", name), f"meshtrain.{name}"))
        )
    ]
    assert not wrong


def test_nothing_tells_to_install_by_name():
    """The package index has another project's `meshtrain`: what is installed stands in a checkout, or is a wheel."""
    told = [
        path
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in TEXTS
    ]
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "README.md", *told)
        for line in path.read_text().splitlines()
        if BY_NAME.search(line)
    ]
    assert len(told) > 500 and not wrong


@pytest.mark.parametrize("page", GUIDES)
def test_a_line_of_code_is_no_wider_than_a_page_shows(page):
    """Records of JSON have a line each, however long; `docs/pages.css` has them go on in the next."""
    lines = [
        line
        for kind, code in fenced(GUIDES[page])
        if kind != "jsonl"
        for line in code.splitlines()
    ]
    assert not [line for line in lines if len(line) > WIDEST]


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_readers_are_warned_of_the_other_project_of_this_name(page):
    warned = re.sub(r"\s+", " ", GUIDES[page])
    assert tells(warned, "`meshtrain` ... package index ... another project")
