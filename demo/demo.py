# SPDX-License-Identifier: Apache-2.0
"""One question to a prefill and a decode server behind the real router: `make demo`."""

import argparse
import sys

from kvferry.demo import report
from kvferry.demo.client import Answer, ChatError, chat
from kvferry.demo.model import default_model_path
from kvferry.demo.ports import LOOPBACK, LOOPBACKS
from kvferry.demo.processes import ProcessError, Processes, exit_on_signals
from kvferry.demo.progress import Progress
from kvferry.demo.stack import Stack

_QUESTION = "Explain in three sentences why a ferry is slower than a bridge, and still useful."
_MAX_TOKENS = 96


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _ask(url: str, question: str, max_tokens: int, *, show: bool) -> Answer:
    return chat(
        url,
        [{"role": "user", "content": question}],
        max_tokens=max_tokens,
        name_tokens=True,
        on_text=_show if show else lambda text: None,
    )


def run(stack: Stack, question: str, max_tokens: int) -> bool:
    """Asks a started stack, asks a colocated server the same, and prints the table.

    Args:
      stack: one prefill server, one decode server and a router, started.
      question: what to ask.
      max_tokens: the longest answer.

    Returns:
      Whether both gave the same tokens.

    Raises:
      ChatError: a request failed.
      ConnectionError: a server does not tell its counters.
      ProcessError: the colocated server did not start.
    """
    say = stack.processes.progress.say
    urls = (stack.prefill_urls[0], stack.decode_urls[0])
    before = [report.server_state(url) for url in urls]
    say(f"\nQ: {question}\nA (through the router, as it comes):\n")
    answer = _ask(stack.router_url, question, max_tokens, show=True)
    sides = [
        report.Side(before=state, after=report.settled_state(url, state))
        for url, state in zip(urls, before, strict=True)
    ]
    say("\n\nAsking one server that does both, to compare.")
    colocated = _ask(stack.start_server("null").url, question, max_tokens, show=False)
    say("\n" + report.render(report.table(answer, colocated, *sides)))
    return report.same_tokens(answer, colocated)


def _demo(stack: Stack, question: str, length: int) -> bool:
    progress = stack.processes.progress
    progress.say("Starting a prefill server, a decode server and the router; logs are in")
    progress.say(f"{stack.processes.log_dir} and go away if all goes well.")
    with stack:
        equal = run(stack, question, length)
    progress.say("Every process has ended. Next: make serve, then make chat.")
    return equal


def main() -> int:
    """Runs the demo.

    Returns:
      The exit status: 0; 1 after a failure or when the tokens differ; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", help="model to serve; default: the demo's own")
    parser.add_argument("--router", choices=["rust", "mini-lb"], default="rust")
    parser.add_argument("--question", default=_QUESTION)
    parser.add_argument("--max_tokens", type=int, default=_MAX_TOKENS, help="longest answer")
    parser.add_argument("--host", choices=LOOPBACKS, default=LOOPBACK, help="where to listen")
    args = parser.parse_args()
    exit_on_signals()
    try:
        model_path = args.model_path or default_model_path()
        progress = Progress()
        progress.say(f"Model: {model_path}")
        processes = Processes(progress=progress)
        stack = Stack(model_path, router=args.router, processes=processes, host=args.host)
        equal = _demo(stack, args.question, args.max_tokens)
    except KeyboardInterrupt:
        print("\nStopped; every process has ended.")
        return 130
    except (ChatError, ConnectionError, FileNotFoundError, ProcessError) as error:
        print(f"\n{error}")
        return 1
    if not equal:
        print("The pair and the single server gave different tokens: that is a fault.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
