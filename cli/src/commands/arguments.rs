//! Arguments of several commands: local runs or a cluster, and formats.

use clap::Args;

use crate::cluster::connect::Options;
use crate::print::Format;

/// Flags that select local runs or a cluster.
#[derive(Clone, Debug, Args)]
pub(crate) struct SourceArgs {
    /// Storage root, a directory or a bucket URL: the --root of `stoker run`, checkpointStorage.url
    /// of the file, or storage.url of the chart
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

/// Flags of commands that show objects.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct ShowArgs {
    /// Output format
    #[arg(long, short, value_parser = Format::of_objects(), default_value = "text")]
    pub(crate) output: Format,
}
