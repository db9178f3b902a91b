//! Tests of pipes: order, waits, ends, and files of others.

use std::collections::VecDeque;
use std::os::fd::AsFd as _;

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;

fn pipe() -> (PipeSender, PipeReceiver) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).unwrap();
    }
    let (sender, file) = PipeSender::create(ours).unwrap();
    (sender, PipeReceiver::open(theirs, &file).unwrap())
}

/// Returns `true` if the other side has woken this one, or has ended.
fn is_woken(socket: &UnixStream, seconds: i64) -> bool {
    !events(socket, seconds).is_empty()
}

fn events(socket: &UnixStream, seconds: i64) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).unwrap();
    fds[0].revents()
}

/// Returns how many bytes a call has moved, 0 if it would have to wait.
fn moved(result: io::Result<usize>) -> usize {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        result => result.unwrap(),
    }
}

/// The byte at a position of the stream, such that neighboring and wrapped positions differ.
fn byte(position: usize) -> u8 {
    (position % 251) as u8 ^ (position / CAPACITY) as u8
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn bytes_arrive_once_and_in_order(
        calls in prop::collection::vec((any::<bool>(), 1..200_000_usize), 1..100),
    ) {
        let (mut sender, mut receiver) = pipe();
        let (mut in_transit, mut num_written) = (VecDeque::new(), 0);
        for (is_write, num) in calls {
            if is_write {
                let bytes: Vec<u8> = (num_written..num_written + num).map(byte).collect();
                let (first, rest) = bytes.split_at(num / 3);
                let slices = [IoSlice::new(first), IoSlice::new(&[]), IoSlice::new(rest)];
                let written = moved(sender.write_vectored(&slices));
                prop_assert_eq!(written, num.min(PIECE_BYTES).min(CAPACITY - in_transit.len()));
                in_transit.extend(&bytes[..written]);
                num_written += written;
            } else {
                let (mut first, mut rest) = (vec![0; num / 2], vec![0; num - num / 2]);
                let mut slices = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut rest)];
                let read = moved(receiver.read_vectored(&mut slices));
                prop_assert_eq!(read, num.min(PIECE_BYTES).min(in_transit.len()));
                let expected: Vec<u8> = in_transit.drain(..read).collect();
                prop_assert!([first, rest].concat()[..read] == expected);
            }
        }
    }
}

#[test]
fn sleeping_sides_are_always_woken() {
    const BYTES: usize = 64 << 20;
    let wait = |socket: &UnixStream, at: usize| match events(socket, 20) {
        // Without bytes to read, the other side has failed.
        woken if woken.contains(PollFlags::HUP) => (&*socket).read_exact(&mut [0]).unwrap(),
        woken => assert_eq!(woken, PollFlags::IN, "sleeping at byte {at}"),
    };
    let (mut sender, mut receiver) = pipe();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut at = 0;
            while at < BYTES {
                // Sizes vary, so that both sides run empty and full.
                let end = BYTES.min(at + 1 + at % 50_021);
                let bytes: Vec<u8> = (at..end).map(byte).collect();
                let num = moved(sender.write(&bytes));
                at += num;
                if num == 0 && !sender.announce_sleep() {
                    wait(sender.socket(), at);
                }
                sender.end_sleep();
            }
        });
        scope.spawn(move || {
            let (mut at, mut bytes) = (0, vec![0; 40_009]);
            while at < BYTES {
                let num = moved(receiver.read(&mut bytes));
                assert!((at..at + num).map(byte).eq(bytes[..num].iter().copied()), "at {at}");
                at += num;
                if num == 0 && !receiver.announce_sleep() {
                    wait(receiver.socket(), at);
                }
                receiver.end_sleep();
            }
        });
    });
}

#[test]
fn sides_that_do_not_sleep_get_no_byte() {
    let (mut sender, mut receiver) = pipe();
    assert_eq!(sender.write(b"one").unwrap(), 3);
    assert_eq!(receiver.read(&mut [0; 8]).unwrap(), 3);
    assert!(!is_woken(receiver.socket(), 0) && !is_woken(sender.socket(), 0));

    assert!(!receiver.announce_sleep());
    assert_eq!(sender.write(b"two").unwrap(), 3);
    assert_eq!(sender.write(b"three").unwrap(), 5);
    assert!(is_woken(receiver.socket(), 20));
    receiver.end_sleep();
    assert!(!is_woken(receiver.socket(), 0));
    // Bytes that were written before the announcement need no sleep.
    assert!(receiver.announce_sleep());
}

#[test]
fn bytes_before_the_end_are_read() {
    let (mut sender, mut receiver) = pipe();
    assert!(!receiver.announce_sleep());
    assert_eq!(sender.write(b"the last").unwrap(), 8);
    drop(sender);
    assert!(is_woken(receiver.socket(), 20));
    receiver.end_sleep();
    let mut bytes = [0; 16];
    assert_eq!(receiver.read(&mut bytes).unwrap(), 8);
    assert_eq!(&bytes[..8], b"the last");
    assert_eq!(receiver.read(&mut bytes).unwrap(), 0);
    assert!(receiver.is_ready());
}

#[test]
fn writes_to_a_closed_pipe_do_not_fail() {
    let (mut sender, receiver) = pipe();
    assert!(!receiver.announce_sleep());
    drop(receiver);
    // As with a socket: the bytes may be the last of a rank that needs no more.
    assert_eq!(sender.write(b"unread").unwrap(), 6);
}

#[test]
fn bytes_can_be_read_without_removing_them() {
    let (mut sender, mut receiver) = pipe();
    sender.write_all(b"12345").unwrap();
    let mut bytes = [0; 4];
    assert!(receiver.peek(&mut bytes) && &bytes == b"1234");
    assert!(!receiver.peek(&mut [0; 6]));
    assert_eq!(receiver.read(&mut bytes).unwrap(), 4);
    assert_eq!(&bytes, b"1234");
}

#[test]
fn other_files_are_refused() {
    let open = |file: std::fs::File| {
        let socket = UnixStream::pair().unwrap().0;
        assert!(PipeReceiver::open(socket, &file.into()).is_err());
    };
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096 + CAPACITY as u64).unwrap();
    // Another process could still make it shorter.
    open(file);

    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let short = std::fs::File::from(memfd_create("short", flags).unwrap());
    short.set_len(CAPACITY as u64).unwrap();
    fcntl_add_seals(&short, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    open(short);
}

#[test]
fn impossible_positions_are_errors() {
    let (mut sender, mut receiver) = pipe();
    receiver.side.memory.word(Word::Written).store(CAPACITY as u64 + 1, Relaxed);
    let error = receiver.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    receiver.side.memory.word(Word::Read).store(1, Relaxed);
    let error = sender.write(b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
}
