//! `stoker experiment|trial|checkpoint`: the same verbs for local runs and for a cluster.

mod arguments;
pub(crate) mod checkpoint;
pub(crate) mod experiment;
pub(crate) mod names;
mod outcome;
pub(crate) mod trial;

pub(crate) use self::arguments::{ShowArgs, SourceArgs};
pub(crate) use self::outcome::{block_on, done};

/// Shown below the help of all verbs that work both locally and on a cluster.
pub(crate) const SOURCE_HELP: &str = "\
Reads the runs under --root if given: local runs, and those that a cluster has recorded in the \
storage. STOKER_STORAGE_ENDPOINT is the endpoint of an S3-compatible server. Otherwise uses the \
cluster from --kubeconfig, KUBECONFIG, ~/.kube/config or the pod's service account. Without any of \
these, reads ./.stoker.";
