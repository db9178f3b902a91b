//! Properties of all pages.

use std::sync::Arc;

use crate::actions::ActionAccess;

/// Where the data of the page comes from.
#[derive(Clone, Debug, Default)]
pub struct Site {
    /// Source of the data, such as `local runs in /home/ada/.stoker`.
    pub place: String,
    /// Whether the experiments run on a cluster.
    pub is_cluster: bool,
    /// Arguments that let `stoker` find the same runs, such as `--root /data/runs` or `--context
    /// prod`, quoted for a shell; empty if they are not needed. `kubectl` takes those of a cluster.
    pub arguments: String,
    /// Access to actions; `None` on a page that cannot have any.
    pub actions: Option<Arc<ActionAccess>>,
    /// Viewer who has signed in; `None` on a page with one viewer.
    pub viewer: Option<SiteViewer>,
}

impl Site {
    /// Returns a command with the arguments.
    pub(crate) fn command(&self, command: &str) -> String {
        match self.arguments.is_empty() {
            true => command.to_owned(),
            false => format!("{command} {}", self.arguments),
        }
    }
}

/// Viewer who has signed in.
#[derive(Clone, Debug)]
pub struct SiteViewer {
    /// Name of the user.
    pub name: String,
    /// Token that forms contain.
    pub csrf: String,
    /// Whether the viewer can sign out here, and not at a proxy.
    pub can_sign_out: bool,
}
