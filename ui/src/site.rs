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
    /// Namespace in which commands create records; `None` if they need none.
    pub namespace: Option<String>,
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

    /// Returns a command that creates a record, with the namespace and the arguments.
    pub(crate) fn creation(&self, command: &str) -> String {
        match &self.namespace {
            Some(namespace) => self.command(&format!("{command} -n {}", quoted(namespace))),
            None => self.command(command),
        }
    }
}

/// Quotes an argument for a POSIX shell, if that is necessary.
pub fn quoted(argument: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    match !argument.is_empty() && argument.bytes().all(is_plain) {
        true => argument.to_owned(),
        // A quote of the shell ends, an escaped quote follows, and a new one begins.
        false => format!("'{}'", argument.replace('\'', "'\\''")),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_copied_commands_are_quoted() {
        let check = |argument: &str, expected: &str| assert_eq!(quoted(argument), expected);
        check("/home/ada/.stoker", "/home/ada/.stoker");
        check("s3://bucket/a-b_c", "s3://bucket/a-b_c");
        check("ada@prod:6443", "ada@prod:6443");
        check("/home/ada/my runs", "'/home/ada/my runs'");
        check("$(reboot)", "'$(reboot)'");
        check("~/runs", "'~/runs'");
        check("it's", "'it'\\''s'");
        check("", "''");
    }

    #[test]
    fn records_are_created_in_the_namespace_of_the_page() {
        let arguments = "--context prod".to_owned();
        let mut site = Site { arguments, namespace: Some("ml".to_owned()), ..Site::default() };
        let command = "stoker job create job.yaml";
        assert_eq!(site.creation(command), format!("{command} -n ml --context prod"));
        site.namespace = None;
        assert_eq!(site.creation(command), format!("{command} --context prod"));
    }
}
