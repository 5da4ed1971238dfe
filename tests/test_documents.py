"""Words that documents and error lines tell readers to type: packages, extras, keys, options."""

import hashlib
import re
import tomllib

import pytest

from connector.transports.choose import TRANSPORTS
from engine import distribution
from engine.errors import ConfigError
from proxy.access.api_key import parse_keys
from tests.options_page import (
    CLUSTER_FILE,
    CLUSTER_SCHEMA,
    OPTIONS,
    cluster_page,
    cluster_schema,
    options_page,
)
from tests.source_tree import ROOT, listed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = (".py", ".md", ".toml", ".yaml", ".html", "Makefile")
# `tandem` of PyPI is another project: pip would install foreign code.
FOREIGN = re.compile(r"pip install[^\n`]*\btandem\b(?!-pd)|\btandem\[(?:%s)\b")
# Flags of `tandem`, `tandem up` and another's program, and the beginning of three.
NOT_OF_SERVERS = {
    *("--help", "--install-completion", "--use-server-token-count"),
    *("--address", "--name", "--dry-run", "--watch"),
    "--ssl-",
}
NAMED = re.compile(r"(?:'\.\[|%s\[|how_to_install\([\"'])([a-z,]+)")


def test_documents_and_errors_name_what_pip_installs() -> None:
    extras = PROJECT["optional-dependencies"]
    assert (PROJECT["name"], PROJECT["version"]) == (distribution.NAME, distribution.VERSION)
    foreign = re.compile(FOREIGN.pattern % "|".join(extras))
    named = re.compile(NAMED.pattern % PROJECT["name"])
    unknown = set()
    for path in listed(ROOT, deep=True):
        if not path.name.endswith(TEXTS):
            continue
        text = path.read_text()
        assert not foreign.search(text), f"{path}: {foreign.search(text)}"
        unknown |= {name for each in named.findall(text) for name in each.split(",")} - {*extras}
    assert unknown == set()
    # The extra of a transport has its name.
    assert {name for name, kind in TRANSPORTS.items() if kind.package} <= {*extras}


def test_the_example_of_a_key_file_lets_nobody_in_until_its_words_are_replaced() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(keys:\n.*?)```", page, re.DOTALL)
    words = re.findall(r"[A-Z]{4,}(?:_[A-Z]+)*", text)
    for kept in words:
        mended = text
        for word in set(words) - {kept}:
            mended = mended.replace(word, hashlib.sha256(word.encode()).hexdigest())
        with pytest.raises(ConfigError):
            parse_keys(mended.encode(), "file")
    mended = mended.replace(kept, hashlib.sha256(kept.encode()).hexdigest())
    assert [key.name for key in parse_keys(mended.encode(), "file")] == ["alice", "batch", "ops"]


def test_every_option_is_written_down() -> None:
    assert OPTIONS.read_text() == options_page(), "run `make tree`"
    assert CLUSTER_FILE.read_text() == cluster_page(), "run `make tree`"
    assert CLUSTER_SCHEMA.read_text() == cluster_schema(), "run `make tree`"


def test_sentences_name_options_that_there_are() -> None:
    options = set(re.findall(r"^\| `(--[a-z-]+)`", options_page(), re.M))
    for page in ("README.md", "docs/operations.md", "docs/security.md"):
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        told = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", prose))
        assert told and told - options - NOT_OF_SERVERS == set(), page
