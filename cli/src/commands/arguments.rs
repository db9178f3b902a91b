//! Arguments of several commands: local runs or a cluster, and trials.

use clap::Args;

use crate::cluster::connect::Options;
use crate::failure::Failure;

/// Flags that select local runs or a cluster.
#[derive(Clone, Debug, Args)]
pub(crate) struct SourceArgs {
    /// Storage root of local runs, a directory or a bucket URL: the --root of `stoker run`, or
    /// checkpointStorage.url of the file
    #[arg(long, value_name = "URL", conflicts_with_all = ["kubeconfig", "context", "namespace"])]
    root: Option<String>,
    #[command(flatten)]
    pub(crate) cluster: Options,
}

impl SourceArgs {
    pub(crate) fn is_cluster(&self) -> bool {
        self.root.is_none() && self.cluster.selects_cluster()
    }

    pub(crate) fn root(&self) -> Option<&str> {
        self.root.as_deref()
    }
}

/// Trial arguments: `mnist-3` or `mnist 3`.
#[derive(Clone, Debug, Args)]
pub(crate) struct TrialName {
    /// Trial name, EXPERIMENT-INDEX, or an experiment name followed by INDEX
    #[arg(value_name = "TRIAL")]
    pub(super) name: String,
    /// Trial index, if TRIAL is an experiment name
    pub(super) index: Option<u32>,
}

impl TrialName {
    /// Returns the name of the trial object on a cluster.
    pub(super) fn joined(&self) -> String {
        match self.index {
            Some(index) => format!("{}-{index}", self.name),
            None => self.name.clone(),
        }
    }

    /// Returns the experiment name and the trial index.
    pub(super) fn split(&self) -> Result<(&str, u32), Failure> {
        let parsed = || {
            let (name, index) = self.name.rsplit_once('-')?;
            Some((name, index.parse().ok()?))
        };
        self.index.map(|index| (self.name.as_str(), index)).or_else(parsed).ok_or_else(|| {
            Failure::Input(format!(
                "`{}` is not a trial name; write EXPERIMENT-INDEX, such as {}-0",
                self.name, self.name
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, index: Option<u32>, joined: &str, split: Option<(&str, u32)>) {
        let trial = TrialName { name: name.to_owned(), index };
        assert_eq!(trial.joined(), joined);
        assert_eq!(trial.split().ok(), split, "{name} {index:?}");
    }

    #[test]
    fn trial_names_are_joined_and_split() {
        check("mnist-3", None, "mnist-3", Some(("mnist", 3)));
        check("mnist", Some(3), "mnist-3", Some(("mnist", 3)));
        check("a-b-12", None, "a-b-12", Some(("a-b", 12)));
        check("mnist-0b3f9c1e", Some(3), "mnist-0b3f9c1e-3", Some(("mnist-0b3f9c1e", 3)));
        check("mnist", None, "mnist", None);
    }
}
