"""A scripted chat client, and vaults to ask about."""

from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.vault import Vault

PHONE = "+41 31 555 01 99"
NOTES = {
    "user.md": "# User\n\n- name: Kim Vale\n- friend: [[entities/ada.md]]\n",
    "entities/ada.md": f"# Ada\n\n- city: Bern\n- phone number: {PHONE}\n- dog: Rufus\n",
}
HIDE = "hide: [{note: Ada, label: phone number}]"


def vault(files=None, limits=None):
    return Vault(MemoryStorage(NOTES if files is None else files), limits)


def code(text, thought="look"):
    return f"<think>{thought}</think><python>{text}</python>"


def reply(text, thought="done"):
    return f"<think>{thought}</think><reply>{text}</reply>"


LOOK = code('text = read_file("entities/ada.md")')
MOVE = code('update_file("entities/ada.md", "- city: Bern", "- city: Basel")')


class Script:
    """Answers with the messages of `script` in order; an exception among them is raised. `log` has conversations."""

    def __init__(self, *script):
        self.script = list(script)
        self.log = []
        self.primers = []

    def begin(self, messages, primer):
        self.log.append(list(messages))
        self.primers.append(primer)

    def answer(self):
        said = self.script.pop(0)
        if isinstance(said, BaseException):
            raise said
        self.log[-1].append({"role": "assistant", "content": said})
        return said

    def observe(self, messages):
        assert self.log[-1][-1]["role"] == "assistant"
        self.log[-1].extend(messages)

    def heard(self):
        """All messages to the model in the current conversation, as one text."""
        return "\n".join(message["content"] for message in self.log[-1])
