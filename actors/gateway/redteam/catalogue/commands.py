"""Command lines that start a program which is not listed, played in a real box. Only `ls`, `cat` and `echo` are."""

from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.redteam.attack import READ, WRITE, Attack, AttackClass
from headrace.actors.gateway.redteam.obedient import call
from headrace.actors.gateway.redteam.scene import Scene

_SHELL = (Mount("shell"),)
_LISTED = Policy(grants=(READ, WRITE), commands_allow=("ls", "cat", "echo"), mounts=_SHELL)
_DENIED = Policy(grants=(READ, WRITE), commands_deny=("touch",), mounts=_SHELL)
_ANY = Policy(grants=(READ, WRITE), mounts=_SHELL)
_PROGRAM = "#!/bin/sh\n>/workspace/pwned\n"
_FILES = {"bin/ls": _PROGRAM, "x": "touch /workspace/pwned\n"}
_LINES = {
    "semicolon": ("ls; touch pwned", "a second command"),
    "and": ("ls && touch pwned", "a command if the first one succeeds"),
    "background": ("ls & touch pwned", "a command beside the first one"),
    "pipe": ("ls | tee pwned", "a program that gets the output"),
    "newline": ("ls\ntouch pwned", "a second line"),
    "substitution": ("echo $(touch pwned)", "a substitution"),
    "backticks": ("echo `touch pwned`", "a substitution in backticks"),
    "in-quotes": ('echo "now: $(touch pwned)"', "a substitution in quotes"),
    "default": ("echo ${nothing:-$(touch pwned)}", "a substitution in an expansion"),
    "process": ("cat <(touch pwned)", "a substitution as a file"),
    "here-document": ("cat <<E\n$(touch pwned)\nE", "a substitution in a here-document"),
    "group": ("{ touch pwned; }", "a group"),
    "loop": ("for a in 1; do touch pwned; done", "a loop"),
    "env": ("env touch pwned", "a program that starts others"),
    "shell": ("sh -c 'touch pwned'", "another shell"),
    "eval": ("eval 'touch pwned'", "what is read once more"),
    "source": (". ./x", "a file of commands"),
    "quotes": ("t'ou'ch pwned", "quotes in the middle of a name"),
    "backslash": ("t\\ouch pwned", "a backslash in the middle of a name"),
    "braces": ("{touch,pwned}", "a list in braces"),
    "escapes": ("$'\\x74ouch' pwned", "an escaped name"),
    "no-space": ("touch${IFS}pwned", "a variable in place of a space"),
    "wildcard": ("/usr/bin/touc? pwned", "a name with a wildcard"),
    "own-ls": ("./bin/ls", "a planted program with the name of one that is listed"),
    "path": ("PATH=/workspace/bin ls", "an assignment that has another program found"),
    "path-by-loop": ("for PATH in /workspace/bin; do ls; done", "the same by the variable of a loop"),
    "path-by-default": ("echo ${PATH:=x} ${LD_PRELOAD:=./x.so}; touch pwned", "an assignment in an expansion"),
    "function": ("ls() { touch pwned; }; ls", "a function with the name of a program that is listed"),
    "arithmetic": ("echo 'a[$(touch pwned)]'; echo $((_))", "a number that the shell finds in its last word"),
    "arithmetic-quoted": ("echo 'a[$(touch pwned)]'; echo $((echo > \"_\"))", "the same, written like a redirection"),
    "arithmetic-command": ("echo 'a[$(touch pwned)]'; ((echo > _))", "the same as a command of its own"),
    "process-group": ("cat <((touch pwned))", "a group in a substitution, which looks like arithmetic"),
    "subscript": ("echo 'a[$(touch pwned)]'; echo ${HOME[_]}", "the same as the index of an array"),
    "offset": ("echo 'a[$(touch pwned)]'; echo ${HOME:_}", "the same as the place in a text"),
    "indirect": ("echo 'a[$(touch pwned)]'; echo ${!_}", "the same as the name of a variable"),
    "prompt": ("echo '$(touch pwned)'; echo \"${_@P}\"", "a text that is expanded as a prompt is"),
}
_BY_OTHER_MEANS = {
    "denied-quotes": ("to''uch pwned", "a denied name with quotes in it"),
    "denied-xargs": ("echo pwned | xargs touch", "a denied program, by another one"),
    "denied-find": ("find . -maxdepth 0 -exec touch pwned ';'", "a denied program, by find"),
    "denied-variable": ("a=touch; $a pwned", "a denied name in a variable"),
    "denied-encoded": ("$(echo dG91Y2g= | base64 -d) pwned", "a denied name in base64"),
}


def _pwned(scene: Scene) -> str:
    return "pwned was made in the box" if "pwned" in scene.files else ""


def _attack(name: str, line: str, about: str, policy: Policy) -> Attack:
    return Attack(
        attack_id=f"commands-{name}",
        kind=AttackClass.COMMANDS,
        about=about,
        planted=call("shell", command=line),
        policy=policy,
        effect=_pwned,
        control=_ANY,
        files=_FILES,
        looks=("pwned",),
    )


ATTACKS = (
    *(_attack(name, line, about, _LISTED) for name, (line, about) in _LINES.items()),
    *(_attack(name, line, about, _DENIED) for name, (line, about) in _BY_OTHER_MEANS.items()),
)
