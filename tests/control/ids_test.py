# SPDX-License-Identifier: Apache-2.0
import threading

from kvferry.control.ids import IdSource, generation_of, new_generation, new_instance_id


def test_ids_do_not_repeat_and_stay_below_53_bits() -> None:
    source = IdSource()
    made = [source.next_id() for _ in range(20_000)]
    assert len(set(made)) == len(made)
    assert all(0 < each < 1 << 53 for each in made)
    assert {generation_of(each) for each in made} == {source.generation}
    assert all(source.owns(each) for each in made)


def test_ids_give_no_hint_at_the_next_one() -> None:
    source = IdSource()
    made = [source.next_id() & ((1 << 40) - 1) for _ in range(4000)]
    steps = {after - before for before, after in zip(made, made[1:], strict=False)}
    assert len(steps) == len(made) - 1
    for bit in range(40):  # Each bit is set about half of the time (6 sigma is 190).
        assert abs(sum(each >> bit & 1 for each in made) - 2000) < 250


def test_another_process_makes_other_ids() -> None:
    first, second = IdSource(), IdSource()
    ours = {first.next_id() for _ in range(1000)}
    assert not any(second.next_id() in ours for _ in range(1000))


def test_threads_share_a_source() -> None:
    source = IdSource()
    made: list[int] = []

    def work() -> None:
        mine = [source.next_id() for _ in range(2000)]
        made.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8000


def test_instances_are_unguessable_and_generations_grow() -> None:
    assert len(new_instance_id()) == 32 and new_instance_id() != new_instance_id()
    first = new_generation()
    assert first <= new_generation() < 1 << 53
