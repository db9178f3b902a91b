//! `stoker experiment|trial|checkpoint`: the same verbs for local runs and for a cluster.

mod arguments;
pub(crate) mod checkpoint;
pub(crate) mod experiment;
pub(crate) mod names;
mod outcome;
pub(crate) mod trial;

pub(crate) use self::arguments::{ShowArgs, SourceArgs};
pub(crate) use self::outcome::{block_on, done};

/// Shown below the help of verbs that change objects.
pub(crate) const ACTION_HELP: &str = "\
Acts on the runs under --root if given. Otherwise uses the cluster from --kubeconfig, KUBECONFIG, \
~/.kube/config or the pod's service account. Without any of these, acts on ./.stoker.";

/// Shown below the help of `wait`.
pub(crate) const WAIT_HELP: &str = "\
Exit codes: 0 completed, 1 failed, 2 invalid input, 3 cancelled, deleted, stopped or timed out.

Waits for the runs under --root if given. Otherwise uses the cluster from --kubeconfig, \
KUBECONFIG, ~/.kube/config or the pod's service account. Without any of these, waits for those of \
./.stoker.";

/// Shown below the help of all verbs that work both locally and on a cluster.
pub(crate) const SOURCE_HELP: &str = "\
Reads the runs under --root if given: local runs, and those that a cluster has recorded in the \
storage. STOKER_STORAGE_ENDPOINT is the endpoint of an S3-compatible server. Otherwise uses the \
cluster from --kubeconfig, KUBECONFIG, ~/.kube/config or the pod's service account. Without any of \
these, reads ./.stoker.";
