"""The registry file: hosts come and go, and no reader sees half of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.actors.remote.registry_file import check_registry, join_registry, leave_registry, read_registry
from headrace.platform.errors import ConfigError


def test_hosts_join_and_leave(tmp_path):
    file = tmp_path / "new" / "hosts.json"
    join_registry(file, "ws://a:1")
    join_registry(file, "ws://b:2")
    join_registry(file, "ws://a:1")
    assert sorted(read_registry(file)) == ["ws://a:1", "ws://b:2"]
    leave_registry(file, "ws://a:1")
    leave_registry(file, "ws://never:9")
    assert read_registry(file) == ["ws://b:2"]
    assert sorted(path.name for path in file.parent.iterdir()) == ["hosts.json", "hosts.json.lock"]


def test_many_at_once_lose_nobody(tmp_path):
    file = tmp_path / "hosts.json"
    addresses = [f"ws://h:{n}" for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda address: join_registry(file, address), addresses))
        assert sorted(read_registry(file)) == sorted(addresses)
        list(threads.map(lambda address: leave_registry(file, address), addresses[1:]))
    assert read_registry(file) == addresses[:1]


@pytest.mark.parametrize("text", ["{", '{"hosts": []}', "[1]"])
def test_another_form_is_refused_by_name_and_left_as_it_is(text, tmp_path):
    file = tmp_path / "hosts.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"hosts\.json"):
        read_registry(file)
    with pytest.raises(ConfigError):
        join_registry(file, "ws://a:1")
    assert file.read_text() == text


def test_whether_hosts_can_be_listed_is_known_beforehand(tmp_path):
    file = tmp_path / "new" / "hosts.json"
    check_registry(file)
    assert read_registry(file) == []
    join_registry(file, "ws://a:1")
    check_registry(file)
    assert read_registry(file) == ["ws://a:1"]
    for wrong in (tmp_path / "new", file / "hosts.json"):
        with pytest.raises(OSError, match=r"directory|exists"):
            check_registry(wrong)
    assert not (tmp_path / "new.lock").exists()


def test_an_empty_file_is_an_empty_list(tmp_path):
    (tmp_path / "hosts.json").write_text("")
    assert read_registry(tmp_path / "hosts.json") == []
