//! Conformance tests of all implementations, and tests of the rendezvous and the watchdog.

mod conformance;
mod rendezvous;
mod segments;
mod stalls;
