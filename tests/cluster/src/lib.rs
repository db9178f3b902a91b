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
mod left_out;
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
pub use left_out::{has_root, leave_out};
pub use ports::free_ports;
pub use s3::S3;

/// Reports whether tests that need a cluster run. With `STOKER_TEST_CLUSTER=off` this records the calling test
/// as left out. Nothing else leaves such a test out: it fails if the cluster cannot be started.
#[track_caller]
pub fn wanted() -> bool {
    let is_off = std::env::var("STOKER_TEST_CLUSTER").is_ok_and(|value| value == "off");
    if is_off {
        leave_out("STOKER_TEST_CLUSTER=off");
    }
    !is_off
}

/// As [`wanted`], for tests with two nodes, which also need root.
#[track_caller]
pub fn nodes_wanted() -> bool {
    wanted() && has_root("network namespaces and containers")
}

/// Whether clusters are to outlive their tests, for a look at them.
fn keep() -> bool {
    std::env::var("STOKER_TEST_CLUSTER_KEEP").is_ok_and(|it| it == "1")
}
