"""What the environment, flags and stdin say about who calls."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from support.cli import FILE_SYSTEM, TOKEN, inside

from fsd.cli.env import DATABASE, Environment, make_claim, store_url
from fsd.host.seam import Crasher
from fsd.model.errors import NotAuthenticated, UsageError


def claim(env: dict[str, str], stdin: bytes = b"", **flags: object):
    return make_claim(Environment(env), SimpleNamespace(**flags), io.BytesIO(stdin))


def test_ours_win_over_theirs_and_flags_over_both() -> None:
    theirs = {"TI_FS_TOKEN": "t", "TI_REGION_CODE": "r", "TI_FS_FILE_SYSTEM_ID": "f"}
    found = claim(theirs)
    assert (found.token, found.region, found.file_system_id) == ("t", "r", "f")
    ours = {**theirs, "FSD_TOKEN": "T", "FSD_REGION_CODE": "R", "FSD_FILE_SYSTEM_ID": "F"}
    found = claim(ours)
    assert (found.token, found.region, found.file_system_id) == ("T", "R", "F")
    found = claim(ours, fs_token="tt", region="rr", file_system_id="ff")
    assert (found.token, found.region, found.file_system_id) == ("tt", "rr", "ff")


def test_an_empty_variable_is_unset() -> None:
    assert claim({"FSD_TOKEN": " ", "TI_FS_TOKEN": "t"}).token == "t"
    assert claim({"FSD_TOKEN": ""}).token is None


def test_secrets_from_stdin() -> None:
    assert claim({}, TOKEN.encode() + b"\n", token_file="-").token == TOKEN
    assert claim({}, b"key-of-admin\n", admin_key_file="-").admin_key == "key-of-admin"
    with pytest.raises(NotAuthenticated, match="holds no secret"):
        claim({}, b"", fs_token="-")
    with pytest.raises(NotAuthenticated):
        claim({}, b"x" * 9000, token_file="-")
    with pytest.raises(NotAuthenticated):
        claim({}, b"\xff\xfe", token_file="-")


def test_the_control_plane_is_where_the_token_leads() -> None:
    found = claim({"FSD_TOKEN": TOKEN, "FSD_ADMIN_KEY": "k"})
    assert found.endpoint == "http://127.0.0.1:9"
    assert (
        claim({"FSD_TOKEN": TOKEN, "FSD_ADMIN_KEY": "k", "FSD_ENDPOINT": "http://h"}).endpoint == "http://h"
    )


def test_no_token_says_what_to_set() -> None:
    found = inside("cat", "/x")
    assert found.code == 3
    assert "FSD_TOKEN" in found.err


@pytest.mark.parametrize(
    "token", ["x", "fsd1.abc", TOKEN[:-1], TOKEN[:60], "fsd2" + TOKEN[4:], "fsd1.!!!!." + "s" * 43]
)
def test_a_damaged_token_is_exit_3(token: str) -> None:
    found = inside("cat", "/x", env={"FSD_TOKEN": token})
    assert found.code == 3
    assert token not in found.err or len(token) < 5


def test_an_unknown_region_is_exit_2_and_lists_the_known() -> None:
    found = inside("cat", "/x", env={"FSD_TOKEN": TOKEN, "FSD_REGION_CODE": "mars"})
    assert found.code == 2
    assert "local" in found.error["message"]
    assert found.error["code"] == "unknown_region"


def test_another_filesystem_than_the_tokens_is_exit_3() -> None:
    found = inside("cat", "/x", "--file-system-id", "fs_bbbbbbbbbbbbbbbbbbbb", env={"FSD_TOKEN": TOKEN})
    assert found.code == 3
    assert FILE_SYSTEM in found.err


def test_a_token_is_not_sent_in_the_clear_to_another_machine() -> None:
    env = {"FSD_TOKEN": TOKEN, "FSD_ENDPOINT": "http://fsd.example"}
    found = inside("cat", "/x", env=env)
    assert found.code == 2
    assert "plain HTTP" in found.err


def test_the_admin_plane_needs_a_server_and_a_key() -> None:
    assert inside("list", env={"FSD_ADMIN_KEY": "k"}).code == 2
    found = inside("list", env={"FSD_ENDPOINT": "http://127.0.0.1:9"})
    assert found.code == 3
    assert "FSD_ADMIN_KEY" in found.err


def test_the_crash_seam() -> None:
    assert Environment({}).host().crash_point("log.synced") is None
    host = Environment({"FSD_CRASH": "log.synced:3"}).host()
    assert host.crash_point == Crasher("log.synced", 3)
    with pytest.raises(UsageError, match="POINT"):
        Environment({"FSD_CRASH": "a b"}).host()


def test_the_state_root_needs_a_home_of_some_kind() -> None:
    assert str(Environment({"XDG_STATE_HOME": "/s", "HOME": "/h"}).state_root()) == "/s/fsd"
    assert str(Environment({"HOME": "/h"}).state_root()) == "/h/.local/state/fsd"
    assert (
        str(Environment({"XDG_STATE_HOME": "relative", "HOME": "/h"}).state_root()) == "/h/.local/state/fsd"
    )


def test_a_home_that_is_no_absolute_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(UsageError, match="HOME='relative' is no absolute path"):
        Environment({"HOME": "relative"}).state_root()


def test_the_claim_hides_its_secrets() -> None:
    shown = repr(claim({"FSD_TOKEN": TOKEN, "FSD_ADMIN_KEY": "admin-key-text"}))
    assert TOKEN not in shown
    assert "admin-key-text" not in shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, False),
        ("postgresql://u@h/db", False),
        ("postgresql:///db?host=/run", False),
        ("s3://b/p?endpoint=http://h:1", False),
        ("postgresql://u:pw@h/db", True),
        ("postgresql:///db?user=u&password=pw", True),
        ("s3://k:s@b/p", True),
    ],
)
def test_a_password_in_a_flag_is_warned_of(given: str | None, shown: bool) -> None:
    said: list[str] = []
    env = Environment({"FSD_DATABASE_URL": "postgresql://u:pw@other/db"})
    found = store_url(env, given, DATABASE, "--database", said.append)
    assert found == (given or "postgresql://u:pw@other/db")
    assert bool(said) is shown
    assert "pw" not in "".join(said)


@pytest.mark.parametrize(
    "url", ["mysql://u:secret@h/db", "host=h password=secret", "postgresql://u:se%cret@h"]
)
def test_a_database_that_is_none_is_not_repeated(url: str) -> None:
    for found in (
        inside("audit", "--database", url),
        inside("audit", env={"FSD_DATABASE_URL": url}),
    ):
        assert found.code == 2
        assert "secret" not in found.err.replace("--database", "")
        assert "se%c" not in found.err
        assert "atabase" in found.err


def test_audit_needs_one_database() -> None:
    assert inside("audit").code == 2
    assert inside("audit", "--data-dir", "/tmp", "--database", "postgresql://h/d").code == 2
