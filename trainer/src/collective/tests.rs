//! Conformance tests of all implementations, and tests of the rendezvous and the watchdog.

mod conformance;
mod rendezvous;
mod segments;
mod stalls;
mod values;

pub(crate) use rendezvous::gang_of;

/// Connects a rank in a separate pod.
pub(crate) fn connected(
    gang: &stoker_api::contract::Gang,
    rank: usize,
) -> Box<dyn super::Collective> {
    Box::new(rendezvous::joined(gang, 0, rank, 1, 20_000).unwrap().0)
}
