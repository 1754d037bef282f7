# SPDX-License-Identifier: Apache-2.0
"""Talks to the stack that `make serve` left running: `make chat`."""

import argparse
import importlib
import importlib.util
import sys

from kvferry.demo import state
from kvferry.demo.client import Answer, ChatError, Message, chat

_HELP = """Type a message and Enter. /new starts over, /help shows this, /quit or Ctrl-D leaves.
Ctrl-C cuts an answer short."""


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _summary(answer: Answer) -> str:
    parts = [f"first token after {answer.ttft_seconds * 1e3:.0f} ms"]
    if answer.tpot_seconds is not None:
        parts.append(f"then {answer.tpot_seconds * 1e3:.0f} ms per token")
    if answer.completion_tokens is not None:
        parts.append(f"{answer.completion_tokens} tokens")
    if answer.finish_reason == "length":
        parts.append("cut at --max_tokens")
    return ", ".join(parts)


class Conversation:
    """What was said so far."""

    def __init__(self, url: str, max_tokens: int, temperature: float) -> None:
        """Starts an empty one.

        Args:
          url: the server's or router's address.
          max_tokens: the longest answer.
          temperature: 0 takes the likeliest token each time.
        """
        self._url = url
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._messages: list[Message] = []

    def clear(self) -> None:
        """Forgets everything."""
        self._messages.clear()

    def say(self, text: str) -> None:
        """Sends a message and shows the answer; one that fails or is cut short is forgotten.

        Args:
          text: the message.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            answer = chat(
                self._url,
                messages,
                max_tokens=self._max_tokens,
                temperature=self._temperature,
                on_text=_show,
            )
        except KeyboardInterrupt:
            print("\n  [cut short; not remembered]")
        except ChatError as error:
            print(f"\n  [{error}]")
        else:
            print(f"\n  [{_summary(answer)}]")
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]


def _loop(conversation: Conversation) -> None:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/new":
            conversation.clear()
            print("  [a new conversation]")
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            conversation.say(line)


def main() -> int:
    """Runs the conversation.

    Returns:
      The exit status: 1 when there is no server to talk to.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="server or router to talk to; default: the one of serve")
    parser.add_argument("--max_tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    url = args.url or state.find(state.state_path())
    if url is None:
        print("Nothing to talk to: run `make serve` in another terminal first, or give --url.")
        return 1
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives input() line editing and a history
    print(f"Talking to {url}. {_HELP}")
    try:
        _loop(Conversation(url.rstrip("/"), args.max_tokens, args.temperature))
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
