//! A real Kubernetes on this machine, for tests: the actual servers, without mocks.
//!
//! There are two levels:
//!
//! - [`ControlPlane`] is etcd and the API server on 127.0.0.1, for tests that write the status of
//!   pods themselves. Any number can run at the same time.
//! - [`Cluster`] adds two nodes with separate kubelets and containerds, DNS, fake GPUs and an S3
//!   server. Only one can run on a machine.
//!
//! Both end when they are dropped and when their process dies, also by a signal. A bash process
//! beside them holds a pipe from their process. When the pipe closes, it kills all servers and
//! removes all files. Because of the pipe, they can also be kept in a `static`, which is never
//! dropped.
//!
//! `STOKER_TEST_CLUSTER=off` skips tests that need a cluster. With `STOKER_TEST_CLUSTER=ipv6`,
//! nodes, pods and services have addresses of IPv6 only. `STOKER_TEST_CLUSTER_KEEP=1` keeps
//! clusters running for inspection until `tests/cluster/down`. tests/cluster/README.md describes
//! how they are built and how long they take.

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
mod skipped;

pub use audit::Request;
pub use client::{Client, PATIENCE, wait_until, wait_within};
pub use cluster::Cluster;
pub use control_plane::{ControlPlane, Options};
pub use error::Error;
pub use ports::free_ports;
pub use s3::S3;
pub use skipped::{has_root, record_skip};

/// Returns the value of `STOKER_TEST_CLUSTER`.
pub(crate) fn switch() -> String {
    std::env::var("STOKER_TEST_CLUSTER").unwrap_or_default()
}

/// Returns whether tests that need a cluster run. With `STOKER_TEST_CLUSTER=off`, records the
/// calling test as skipped. Such a test is never skipped otherwise: it fails if the cluster cannot
/// be started.
#[track_caller]
pub fn clusters_enabled() -> bool {
    let is_off = switch() == "off";
    if is_off {
        record_skip("STOKER_TEST_CLUSTER=off");
    }
    !is_off
}

/// Same as [`clusters_enabled`], for tests with two nodes, which also need root.
#[track_caller]
pub fn nodes_enabled() -> bool {
    clusters_enabled() && has_root("network namespaces and containers")
}

/// Whether clusters outlive their tests, for inspection.
fn keep() -> bool {
    std::env::var("STOKER_TEST_CLUSTER_KEEP").is_ok_and(|value| value == "1")
}
