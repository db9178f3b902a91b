//! Ports for servers that are told which to take.

use std::net::TcpListener;
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{At, Error};

/// Below what Linux gives to outgoing connections (32768 to 60999 unless told otherwise): a server
/// that begins again finds its port still free.
const PORTS: Range<u16> = 10_000..30_000;

/// Ports of 127.0.0.1, one after another, that nobody has and that no outgoing connection is given.
/// Another call of this process gives others.
///
/// # Errors
///
/// [`Error::Io`] if all are taken.
pub fn free_ports<const N: usize>() -> Result<[u16; N], Error> {
    // Processes that run at the same time look in different places first.
    static NEXT: LazyLock<AtomicU32> =
        LazyLock::new(|| AtomicU32::new(std::process::id().wrapping_mul(2_654_435_761) >> 8));
    let (num_wanted, num_all) = (N as u32, PORTS.len() as u32);
    let mut last = Ok([0; N]);
    for _ in 0..num_all / num_wanted.max(1) {
        let from = NEXT.fetch_add(num_wanted, Ordering::Relaxed) % (num_all - num_wanted);
        let ports = std::array::from_fn(|it| PORTS.start + (from as usize + it) as u16);
        let held: Result<Vec<_>, _> =
            ports.iter().map(|it| TcpListener::bind(("127.0.0.1", *it))).collect();
        match held {
            Ok(_) => return Ok(ports),
            Err(error) => last = Err(error).at(format!("127.0.0.1:{}", ports[0])),
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_follow_each_other_are_free_and_given_once() {
        let [a, b] = free_ports().unwrap();
        assert_eq!(b, a + 1);
        let _taken: Vec<_> = [a, b].map(|it| TcpListener::bind(("127.0.0.1", it)).unwrap()).into();
        for _ in 0..100 {
            let [c, d] = free_ports().unwrap();
            assert!(c > b || d < a, "{c}, {d}");
            assert!(PORTS.contains(&c) && PORTS.contains(&d));
        }
    }

    #[test]
    fn outgoing_connections_are_given_others() {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let first: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        assert!(PORTS.end <= first, "{range}");
    }
}
