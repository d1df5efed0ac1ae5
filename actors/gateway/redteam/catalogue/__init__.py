"""The attacks, one file for each class."""

from headrace.actors.gateway.redteam.attack import Attack
from headrace.actors.gateway.redteam.catalogue import (
    addresses,
    approvals,
    arguments,
    audit,
    commands,
    credentials,
    definitions,
    injection,
    keys,
    outputs,
    paths,
    redirects,
)

ATTACKS: tuple[Attack, ...] = (
    *injection.ATTACKS,
    *paths.ATTACKS,
    *commands.ATTACKS,
    *addresses.ATTACKS,
    *redirects.ATTACKS,
    *arguments.ATTACKS,
    *outputs.ATTACKS,
    *definitions.ATTACKS,
    *keys.ATTACKS,
    *approvals.ATTACKS,
    *audit.ATTACKS,
    *credentials.ATTACKS,
)
