//! Free ports for servers that need a fixed port.

use std::net::TcpListener;
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, WithPath};

/// Ports below Linux's ephemeral range (by default 32768 to 60999). The kernel assigns none of them
/// to a connection, so the port of a stopped server stays free until its restart.
const PORTS: Range<u16> = 10_000..30_000;

/// Maximum number of ports that one call returns.
const NUM_MAX: u32 = 16;

/// Returns the position in [`PORTS`] of the first of `num` ports, and advances `next` by `num`. The
/// divisor is the same for each `num`, so that calls with different numbers do not overlap.
fn take(next: &AtomicU32, num: u32) -> usize {
    let num_firsts = PORTS.len() as u32 - NUM_MAX;
    (next.fetch_add(num, Ordering::Relaxed) % num_firsts) as usize
}

/// Returns consecutive ports of 127.0.0.1 that are free and outside the ephemeral range. Calls in
/// this process return different ports, until almost all ports were returned once.
///
/// # Errors
///
/// [`Error::Io`] if all ports are taken.
pub fn free_ports<const N: usize>() -> Result<[u16; N], Error> {
    const { assert!(N <= NUM_MAX as usize, "a call returns at most 16 ports") };
    // Concurrent processes start their search at different ports.
    static NEXT: LazyLock<AtomicU32> =
        LazyLock::new(|| AtomicU32::new(std::process::id().wrapping_mul(2_654_435_761) >> 8));
    let (num_wanted, num_all) = (N as u32, PORTS.len() as u32);
    let mut last = Ok([0; N]);
    for _ in 0..num_all / num_wanted.max(1) {
        let from = take(&NEXT, num_wanted);
        let ports = std::array::from_fn(|idx| PORTS.start + (from + idx) as u16);
        let held: Result<Vec<_>, _> =
            ports.iter().map(|port| TcpListener::bind(("127.0.0.1", *port))).collect();
        match held {
            Ok(_) => return Ok(ports),
            Err(error) => last = Err(error).with_path(format!("127.0.0.1:{}", ports[0])),
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn free_ports_are_consecutive_and_unique() {
        let [a, b] = free_ports().unwrap();
        assert_eq!(b, a + 1);
        let bind = |port| TcpListener::bind(("127.0.0.1", port)).unwrap();
        let _taken: Vec<_> = [a, b].map(bind).into();
        for _ in 0..100 {
            let [c, d] = free_ports().unwrap();
            assert!(c > b || d < a, "{c}, {d}");
            assert!(PORTS.contains(&c) && PORTS.contains(&d));
        }
    }

    #[test]
    fn calls_with_different_numbers_do_not_overlap() {
        // The process ID sets the start.
        for start in [0, 19_970, 1 << 20, u32::MAX >> 8] {
            let next = AtomicU32::new(start);
            let mut taken = BTreeSet::new();
            for num in [2_u32, 3].repeat(3_900) {
                let first = take(&next, num);
                for position in first..first + num as usize {
                    assert!(position < PORTS.len(), "{start}: {position}");
                    assert!(taken.insert(position), "{start}: {position} twice");
                }
            }
        }
    }

    #[test]
    fn ports_are_below_the_ephemeral_range() {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let first: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        assert!(PORTS.end <= first, "{range}");
    }
}
