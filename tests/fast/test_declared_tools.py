"""What an author declares of a tool reaches the gateway as its spec."""

import pytest

import headrace
from headrace.actors.environments.doors.function_schema import tool_function
from headrace.platform.errors import ConfigError
from headrace.platform.records.status import Capability, SideEffectTier


def spec_of(**declared):
    @headrace.tool(**declared)
    def order(address: str, amount: int = 1) -> str:
        """Order something."""
        return f"{amount} from {address}"

    assert order("x") == "1 from x"
    return tool_function(order).spec


def test_a_function_without_a_declaration_reads():
    def look(key: str) -> str:
        return key

    spec = tool_function(look).spec
    assert (spec.capability, spec.tier, spec.reads) == (Capability.READ, SideEffectTier.READ, {})


def test_all_that_is_declared_is_in_the_spec():
    spec = spec_of(capability="network", tier="irreversible", reads={"address": "url"}, trusted=True, price=0.5)
    assert (spec.capability, spec.tier) == (Capability.NETWORK, SideEffectTier.IRREVERSIBLE)
    assert (spec.reads, spec.trusted, spec.price) == ({"address": "url"}, True, 0.5)
    assert spec.parameters["required"] == ["address"]


@pytest.mark.parametrize(
    ("capability", "tier"),
    [("read", "read"), ("write", "write"), ("network", "write"), ("secret", "write"), ("irreversible", "irreversible")],
)
def test_the_usual_tier_of_a_capability(capability, tier):
    assert spec_of(capability=capability).tier == tier


def test_a_method_keeps_its_declaration():
    class Shop:
        @headrace.tool(capability="write")
        def buy(self, item: str) -> str:
            return item

    assert tool_function(Shop().buy).spec.capability is Capability.WRITE


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"capability": "wirte"}, "capability is one of read, write"),
        ({"tier": "never"}, "tier is one of read, write, irreversible"),
        ({"reads": {"address": "uri"}}, "is one of path, command, code, url, text, not 'uri'"),
        ({"reads": {"adress": "url"}}, "names adress, which is no argument"),
        ({"price": -1}, "0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(declared, told):
    with pytest.raises(ConfigError, match=told):
        spec_of(**declared)
