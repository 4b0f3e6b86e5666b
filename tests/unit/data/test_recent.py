from titanlite.runtime.cache import Recent


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    made: list[str] = []
    recent: Recent[str, str] = Recent(6, len)

    def get(key: str, value: str) -> str:
        return recent.get(key, lambda: made.append(key) or value)  # type: ignore[func-returns-value]

    assert [get("a", "aa"), get("b", "bbb"), get("a", "?")] == ["aa", "bbb", "aa"]
    get("c", "cccc")
    assert get("a", "?") == "aa"
    assert get("b", "bbb") == "bbb"
    assert made == ["a", "b", "c", "b"]


def test_the_latest_entry_is_kept_at_any_size() -> None:
    recent: Recent[int, str] = Recent(2, len)
    assert recent.get(1, lambda: "long") == "long"
    assert recent.get(1, lambda: "other") == "long"
    assert recent.get(2, lambda: "x") == "x"
    assert recent.get(1, lambda: "other") == "other"
