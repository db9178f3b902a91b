//! A real Kubernetes on this machine, for tests: the servers themselves, no mock.
//!
//! Two levels. [`ControlPlane`] is etcd and the API server on 127.0.0.1, for tests that write pods'
//! status themselves; any number may run at once. [`Cluster`] adds two nodes with kubelets and
//! containerds of their own, DNS, GPUs that do not exist, and an S3 server; a machine has room for
//! one.
//!
//! Both end when they are dropped and when their process dies, also by a signal: bash runs beside
//! them, holds a pipe from their process, and when that closes ends what was started and removes
//! what was made. The pipe also makes them fit for a `static`, which is never dropped.
//!
//! `STOKER_TEST_CLUSTER=off` leaves out tests that need one; `STOKER_TEST_CLUSTER_KEEP=1` leaves them
//! running, for a look at them, until `tests/cluster/down`. tests/cluster/README.md says how they are
//! built and how long they take.

mod audit;
mod certificates;
mod client;
mod cluster;
mod control_plane;
mod error;
mod network;
mod node;
mod ports;
mod programs;
mod s3;
mod servers;

pub use audit::Request;
pub use client::{Client, wait_until};
pub use cluster::Cluster;
pub use control_plane::{ControlPlane, Options};
pub use error::Error;
pub use ports::free_ports;
pub use s3::S3;

/// Whether tests that need a cluster are to run: `STOKER_TEST_CLUSTER=off` leaves them out. Nothing
/// else does: a cluster that cannot be had fails its tests.
pub fn wanted() -> bool {
    let is_off = std::env::var("STOKER_TEST_CLUSTER").is_ok_and(|it| it == "off");
    if is_off {
        eprintln!("left out, by STOKER_TEST_CLUSTER=off");
    }
    !is_off
}

/// Whether clusters are to outlive their tests, for a look at them.
fn keep() -> bool {
    std::env::var("STOKER_TEST_CLUSTER_KEEP").is_ok_and(|it| it == "1")
}
