"""The ragged exchange of experts: what each device sends arrives where the receiver reads it, and comes back."""

import numpy as np
import pytest

from meshtrain.models import experts, ragged

NUM_DEVICES, NUM_TOKENS, NUM_CHOSEN, NUM_HERE = 4, 5, 3, 2


def choices(seed):
    """Experts of the tokens of all devices, [n t, k]; no token chooses one twice, and no token the last device's."""
    draw = np.random.default_rng(seed)
    num_tokens, num_experts = NUM_DEVICES * NUM_TOKENS, (NUM_DEVICES - 1) * NUM_HERE
    return np.stack([draw.permutation(num_experts)[:NUM_CHOSEN] for _ in range(num_tokens)]).astype(np.int32)


def exchanged(operands, ways, num_rows):
    """What `jax.lax.ragged_all_to_all` documents: each sender says where the receiver writes; -1 where nobody does."""
    results = np.full((len(operands), num_rows), -1)
    for sender, (operand, way) in enumerate(zip(operands, ways, strict=True)):
        for receiver, (read, size, write) in enumerate(zip(way.reads, way.sends, way.writes, strict=True)):
            assert size == ways[receiver].gets[sender]
            assert read + size <= len(operand)
            assert write + size <= num_rows
            assert (results[receiver, write : write + size] == -1).all()
            results[receiver, write : write + size] = operand[read : read + size]
    return results


@pytest.mark.parametrize("room", [NUM_DEVICES * NUM_TOKENS * NUM_HERE, 13], ids=["of the worst case", "too little"])
def test_choices_arrive_in_their_order_until_there_is_no_room_and_come_back(room):
    chosen = choices(0)
    num_sent, flat = NUM_TOKENS * NUM_CHOSEN, chosen.reshape(-1)
    of_devices = [ragged.ways(chosen, NUM_DEVICES, NUM_HERE, room, device) for device in range(NUM_DEVICES)]
    there, back = ([ragged.Way(*map(np.asarray, way)) for way in ways] for ways in zip(*of_devices, strict=True))
    numbers = np.arange(flat.size).reshape(NUM_DEVICES, -1)
    owners = flat.reshape(NUM_DEVICES, -1) // NUM_HERE
    operands = np.take_along_axis(numbers, np.argsort(owners, axis=1, kind="stable"), axis=1)
    arrived = exchanged(operands, there, room)
    for device, rows in enumerate(arrived):
        wanted = np.flatnonzero(flat // NUM_HERE == device)[:room]
        np.testing.assert_array_equal(rows, np.pad(wanted, (0, room - wanted.size), constant_values=-1))
    returned = exchanged(arrived, back, num_sent)
    found_room = np.isin(operands, arrived)
    np.testing.assert_array_equal(returned, np.where(found_room, operands, -1))
    assert found_room.all() == (room > 13)


@pytest.mark.parametrize("room", [NUM_DEVICES * NUM_TOKENS * NUM_HERE, 13], ids=["of the worst case", "too little"])
def test_rows_of_blocks_read_the_choices_that_arrived(room):
    chosen = choices(1)
    local = np.where(chosen // NUM_HERE == 1, chosen - NUM_HERE, NUM_HERE).astype(np.int32)
    placed = experts.placed(local, NUM_HERE, room, 16)
    rows, places = ragged.arrivals(local.reshape(-1), NUM_HERE, room, placed.choices)
    arrived = np.flatnonzero(local.reshape(-1) < NUM_HERE)[:room]
    is_real = np.asarray(placed.choices) < chosen.size
    assert is_real.sum() == arrived.size
    np.testing.assert_array_equal(arrived[np.asarray(rows)[is_real]], np.asarray(placed.choices)[is_real])
    assert (np.asarray(rows)[~is_real] == room).all()
    np.testing.assert_array_equal(np.asarray(rows)[np.asarray(places)[: arrived.size, 0]], np.arange(arrived.size))
    assert (np.asarray(places)[arrived.size :] == placed.choices.size).all()
