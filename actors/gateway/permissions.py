"""From a recipe to a policy: what the gateway process gets instead of configuration."""

from headrace.actors.gateway.policy import CallBudgets, Mount, Policy, Rule
from headrace.platform.config.environments import EnvironmentConfig


def policy_of(config: EnvironmentConfig) -> Policy:
    """The policy that a recipe gives an environment."""
    given = config.permissions
    return Policy(
        grants=tuple(each.grant() for each in given.grants),
        ceiling=tuple(each.grant() for each in given.tasks_may_grant),
        rules=tuple(Rule(**rule.model_dump()) for rule in given.rules),
        commands_allow=given.commands.allow,
        commands_deny=given.commands.deny,
        paths=given.paths,
        domains=given.domains,
        addresses=given.addresses,
        taint=given.taint,
        taint_mode=given.taint_mode,
        approvals=given.approvals,
        approval_s=given.approval_s,
        budgets=CallBudgets(**given.budgets.model_dump()),
        output_kb=given.output_kb,
        on_block=given.on_block,
        max_violations=given.max_violations,
        mounts=tuple(Mount(tool.kind, tool.name, tool.capability, tool.args) for tool in config.tools),
    )
