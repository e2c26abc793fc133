"""farflung.toml: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node import config
from node.config import KEYS, BulkConfig, Config, DevnetConfig, TrackingConfig, TrainerConfig, resolve
from node.errors import UserError
from protocol.identity import Identity, peer_id

PEER = peer_id(Identity(bytes(32)).node)
PATH = Path("farflung.toml")


def test_a_missing_file_is_the_default(tmp_path: Path) -> None:
    assert config.load(tmp_path / "farflung.toml") == Config()


def test_write_and_load(tmp_path: Path) -> None:
    path = tmp_path / "farflung.toml"
    value = Config(
        name='a "quoted" \\ name',
        listen=("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/4001"),
        bootstrap=(f"/dns4/example.org/tcp/4001/p2p/{PEER}",),
        willing=("inference",),
        log_level="debug",
        threads=3,
        engine="vllm",
        tensor_parallel=4,
        trainer=TrainerConfig(processes=2, recompute="on", eval_every=5, eval_greedy=True),
        bulk=BulkConfig(
            listen=("/ip4/127.0.0.1/tcp/0",),
            announce=("/dns4/weights.example.org/tcp/443/https/http-path/a%2Fb",),
            proxied=True,
            rate=100,
            connections=64,
        ),
        tracking=TrackingConfig(tensorboard="runs/one", wandb="far flung"),
        devnet=DevnetConfig(cheat="forged-reward", pause_at_step=7),
    )
    config.write(value, path)
    assert config.load(path) == value
    config.write(replace(value, tracking=TrackingConfig(tensorboard=True)), path)
    assert config.load(path).tracking.tensorboard is True
    config.write(Config(), path)
    assert config.load(path) == Config()
    assert [item.name for item in tmp_path.iterdir()] == ["farflung.toml"]


@given(name=st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=32))
def test_every_name_survives(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "names.toml"
    config.write(Config(name=name), path)
    assert config.load(path).name == name


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("colour = 1", "'colour'"),
        ("[devnet]\ncheats = 1", "'devnet.cheats'"),
        ("devnet = 1", "devnet"),
        ("trainer = 1", "trainer"),
        ("[trainer]\nprocess = 1", "'trainer.process'"),
        ("[trainer]\nprocesses = 0", "trainer.processes"),
        ('[trainer]\nrecompute = "yes"', "trainer.recompute"),
        ("[trainer]\neval_every = -1", "trainer.eval_every"),
        ("[trainer]\neval_samples = 257", "trainer.eval_samples"),
        ("[tracking]\ntensorboard = 1", "tracking.tensorboard"),
        ('[tracking]\ntensorboard = ""', "tracking.tensorboard"),
        ("[tracking]\nwandb = true", "tracking.wandb"),
        ('[tracking]\nwandb = "a/b"', "tracking.wandb"),
        ("name = 1", "name"),
        ('name = ""', "name"),
        (f'name = "{"x" * 33}"', "name"),
        ('name = "\\n"', "name"),
        ("listen = []", "listen"),
        ('listen = "/ip4/127.0.0.1/tcp/1"', "listen"),
        ('listen = ["/ip4/127.0.0.1/udp/1"]', "listen"),
        ('listen = ["/dns4/example.org/tcp/1"]', "listen"),
        ("listen = " + "[" * 100_000, "brackets"),
        ('listen = ["/ip4/127.0.0.300/tcp/1"]', "listen"),
        ('listen = ["/ip6/127.0.0.1/tcp/1"]', "listen"),
        ('listen = ["/ip4/127.0.0.1/tcp/70000"]', "listen"),
        (f'listen = ["/ip4/127.0.0.1/tcp/1/p2p/{PEER}"]', "listen"),
        ("listen = [1]", "listen"),
        ('bootstrap = ["/ip4/127.0.0.1/tcp/1"]', "bootstrap"),
        ('bootstrap = ["/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]', "bootstrap"),
        (f'bootstrap = ["/ip4/127.0.0.1/tcp/0/p2p/{PEER}"]', "bootstrap"),
        ('willing = ["none"]', "willing"),
        ('willing = ["relay", "relay"]', "willing"),
        ("willing = [[]]", "willing"),
        ('log_level = "loud"', "log_level"),
        ("log_level = []", "log_level"),
        ("threads = 0", "threads"),
        ("threads = true", "threads"),
        ("threads = 1.5", "threads"),
        ('engine = "tpu"', "engine"),
        ("tensor_parallel = 0", "tensor_parallel"),
        ("bulk = 1", "expected a section: [bulk]"),
        ("[bulk]\ncolour = 1", "known keys are listen, announce, proxied"),
        ("[bulk]\nproxied = 1", "bulk.proxied: expected true or false"),
        ("[bulk]\nrate = -1", "bulk.rate"),
        ("[bulk]\nrate = true", "bulk.rate"),
        ("[bulk]\nconnections = 0", "bulk.connections"),
        ('[bulk]\nlisten = ["/dns4/example.org/tcp/1"]', "bulk.listen"),
        ('[bulk]\nannounce = ["/ip4/127.0.0.1/tcp/1"]', "bulk.announce"),
        ("[bulk]\nannounce = [1]", "bulk.announce"),
        ('[bulk]\nannounce = ["/ip4/127.0.0.1/tcp/0/http"]', "bulk.announce"),
        ('[devnet]\ncheat = "steal"', "devnet.cheat"),
        ("[devnet]\npause_at_step = -1", "devnet.pause_at_step"),
    ],
)
def test_a_mistake_names_file_and_key(text: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        config.parse(text, PATH)
    message = str(caught.value)
    assert message.startswith("farflung.toml: ")
    assert key in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("threads = 0", 1),
        ("# a remark\n\nthreads = 0\n", 3),
        ('name = "a"\n"threads"=0\nlog_level = "info"', 2),
        ('name = "a"\nlisten = [\n  "/ip4/127.0.0.1/tcp/1",\n  # threads = 0\n  "rubbish",\n]\n', 2),
        ('name = """\\\nthreads = 0"""\ncolour = 1', 3),
        ('name = "a"\n[devnet]\n\npause_at_step = 1\ncheat = "steal"', 5),
        ('threads = 1\ndevnet.cheat = "steal"', 2),
        ("threads = 1\ndevnet = {pause_at_step = -1}", 2),
        ("threads = 1\ndevnet = 1", 2),
        ("threads = 1\r\n\r\ncolour = 1\r\n", 3),
        ("threads = 1\n[other]\nthreads = 0", 2),
        ("[devnet]\n\n[devnet.inner]\na = 1", 3),
        ('name = "a"\nname = "b"', 2),
        ("threads = 1\nlisten = [", 2),
    ],
)
def test_a_mistake_names_its_line(text: str, line: int) -> None:
    with pytest.raises(UserError, match=rf"^farflung.toml: line {line}: "):
        config.parse(text, PATH)


def test_flags_come_before_the_environment_before_the_file_before_defaults(tmp_path: Path) -> None:
    path = tmp_path / "farflung.toml"
    path.write_text('name = "file"\nthreads = 2\nlog_level = "error"\n[devnet]\npause_at_step = 3\n')
    environment = {
        "FARFLUNG_THREADS": "4",
        "FARFLUNG_LOG_LEVEL": "debug",
        "FARFLUNG_WILLING": "relay, inference",
        "FARFLUNG_DEVNET_CHEAT": "",
        "FARFLUNG_BULK_PROXIED": "true",
        "FARFLUNG_BULK_PEER_RATE": "50",
        "FARFLUNG_BULK_ANNOUNCE": "/ip4/192.0.2.1/tcp/80/http,/ip4/192.0.2.1/tcp/443/https",
        "FARFLUNG_DEVNET_PAUSE_AT_STEP": "5",
        "FARFLUNG_DATA_DIR": "/elsewhere",
        "FARFLUNG_VECTORS": "somebody else's",
        "THREADS": "9",
    }
    assert resolve(path, environment=environment, flags={"log_level": "warning"}) == Config(
        name="file",
        threads=4,
        log_level="warning",
        willing=("relay", "inference"),
        bulk=BulkConfig(
            announce=("/ip4/192.0.2.1/tcp/80/http", "/ip4/192.0.2.1/tcp/443/https"), proxied=True, peer_rate=50
        ),
        devnet=DevnetConfig(pause_at_step=5),
    )
    assert resolve(tmp_path / "missing", environment={}) == Config()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"FARFLUNG_THREADS": "many"}, "FARFLUNG_THREADS: expected an integer"),
        ({"FARFLUNG_THREADS": "1.0"}, "FARFLUNG_THREADS: expected an integer"),
        ({"FARFLUNG_BULK_PROXIED": "yes"}, "FARFLUNG_BULK_PROXIED: expected true or false"),
        ({"FARFLUNG_LISTEN": ""}, "FARFLUNG_LISTEN: expected a list"),
        ({"FARFLUNG_LISTEN": "/ip4/127.0.0.1/tcp/0,rubbish"}, "FARFLUNG_LISTEN: 'rubbish'"),
        ({"FARFLUNG_DEVNET_CHEAT": "steal"}, "FARFLUNG_DEVNET_CHEAT: expected one of"),
        ({"FARFLUNG_THREAD": "2"}, "FARFLUNG_THREAD: there is no such variable; FARFLUNG_THREADS is meant"),
    ],
)
def test_a_mistake_in_the_environment_names_its_variable(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(PATH, environment=environment)
    assert str(caught.value).startswith(said)


def test_a_mistake_on_the_command_line_names_its_flag() -> None:
    with pytest.raises(UserError, match=r"^--log-level: "):
        resolve(PATH, environment={}, flags={"log_level": "loud"})


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        resolve(tmp_path / "farflung.toml", required=True, environment={})


def test_a_devnets_nodes_read_their_files_only() -> None:
    variables = {key.variable: "x" for key in KEYS.values()}
    kept = {"PATH": "/bin", "FARFLUNG_VECTORS": "/v"}
    assert config.without_overrides({**variables, **kept, "FARFLUNG_CONFIG": "x"}) == kept


@settings(max_examples=20)
@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "name": st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=32),
            "threads": st.integers(1, 1024),
            "listen": st.just(["/ip4/127.0.0.1/tcp/0"]),
            "trainer.processes": st.integers(1, 64),
            "devnet.cheat": st.sampled_from(config.CHEATS),
        },
    )
)
def test_a_template_sets_what_it_is_given_and_explains_the_rest(
    values: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "template.toml"
    config.write_template(path, values)
    assert config.load(path) == resolve(PATH, environment={}, flags=values)
    text = path.read_text()
    # What is commented out is the default, ready to be changed.
    assert config.parse(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE), path) == config.load(path)


def test_the_documentation_has_every_key_as_it_is_declared() -> None:
    document = (Path(__file__).parents[2] / "docs" / "OPERATING.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)` \| `(FARFLUNG_[A-Z_]+)` \| `(.*?)` \| (.*) \|$", document, re.MULTILINE)
    assert [row[:3] for row in rows] == [(key.name, key.variable, json.dumps(key.default)) for key in KEYS.values()]
    for name, _, _, text in rows:
        assert text.startswith(KEYS[name].meaning)


def test_a_declaration_is_what_the_configuration_has() -> None:
    for name, key in KEYS.items():
        value: object = Config()
        for part in name.split("."):
            value = getattr(value, part)
        assert (list(value) if isinstance(value, tuple) else value) == key.default
        assert key.check(key.default) is None


def test_broken_toml_names_the_line() -> None:
    with pytest.raises(UserError, match="line 2"):
        config.parse('name = "a"\nlisten = oops', PATH)


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "farflung.toml"
    path.write_bytes(b'threads = 1\nname = "\xff"')
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        config.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        config.load(tmp_path)
    path.write_bytes(b"\xef\xbb\xbfthreads = 2")  # as some editors save UTF-8
    assert config.load(path).threads == 2
    # Whoever needs the folder says what is wrong with it.
    assert config.load(path / "farflung.toml") == Config()


def test_a_bad_configuration_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="threads"):
        config.write(Config(threads=0), tmp_path / "farflung.toml")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot be written"):
        config.write(Config(), tmp_path / "missing" / "farflung.toml")
