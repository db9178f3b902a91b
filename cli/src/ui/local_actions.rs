//! Actions of the page on local runs: the same as those of the commands.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use stoker_ui::{Action, ActionAccess, ActionBackend, ClusterObjects, Permissions, Target};
use tokio::runtime::Handle;

use crate::failure::Failure;
use crate::reopen;
use crate::run::record::random_hex;
use crate::run_root::RunRoot;
use crate::show::{RecordedRun, delete_run, set_state_of};

/// Local runs below a root.
#[derive(Clone, Debug)]
struct LocalRuns {
    /// Root of the command line; `None` for the default.
    root: Option<String>,
}

/// Returns the access to actions on the local runs below a root.
pub(super) fn access(root: Option<String>, allows_actions: bool) -> Result<ActionAccess, Failure> {
    let token = random_hex(super::TOKEN_BYTES)?;
    Ok(ActionAccess::new(Arc::new(LocalRuns { root }), allows_actions, token))
}

impl LocalRuns {
    async fn act(&self, target: &Target, action: Action) -> Result<String, Failure> {
        let root = self.root.as_deref();
        // Another run may have this run's ID as its name, so the record is opened by its directory.
        let run_root = RunRoot::resolve(root, None)?;
        // Records of trials may be damaged.
        let with_trials = !matches!(action, Action::Delete);
        let run = RecordedRun::open_local(&run_root, [&target.name, &target.uid], with_trials)?;
        if run.paths.uid != target.uid || run.paths.namespace != target.namespace {
            return Err(Failure::Input(format!(
                "cannot change {}: its UID is not that on the page; load the page again",
                run.id()
            )));
        }
        if let Some(state) = action.desired_state() {
            return set_state_of(root, &run, state).await;
        }
        if let Action::Continue(trials) = action {
            return reopen::continue_run(root, &run, trials);
        }
        let location = delete_run(root, &run, &run.id()).await?;
        Ok(format!("checkpoints, metrics and logs deleted from {location}"))
    }
}

impl ActionBackend for LocalRuns {
    fn act<'a>(
        &'a self,
        target: &'a Target,
        action: Action,
    ) -> BoxFuture<'a, Result<String, String>> {
        let (runs, target) = (self.clone(), target.clone());
        // Files and locks can make this wait.
        let acted = tokio::task::spawn_blocking(move || {
            Handle::current().block_on(runs.act(&target, action)).map_err(|error| error.to_string())
        });
        async { acted.await.unwrap_or_else(|error| Err(error.to_string())) }.boxed()
    }

    fn permissions<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Permissions, String>> {
        async { Ok(Permissions { may_patch: true, may_delete: true }) }.boxed()
    }

    fn objects(&self) -> BoxFuture<'_, Option<ClusterObjects>> {
        async { None }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn run_with_a_damaged_trial_can_only_be_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str();
        let record = RunRoot::resolve(root, None).unwrap().record_dir("a", "0123456789");
        std::fs::create_dir_all(record.join("trials")).unwrap();
        let experiment = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "a", "namespace": "default", "uid": "0123456789"},
            "spec": {
                "entrypoint": {"command": ["true"]},
                "searcher": {"metric": "loss", "maxLength": {"batches": 4}, "single": {}},
            },
        });
        std::fs::write(record.join("experiment.json"), experiment.to_string()).unwrap();
        std::fs::write(record.join("trials/0.json"), "{").unwrap();
        let runs = LocalRuns { root: root.map(str::to_owned) };
        let [namespace, name, uid] = ["default", "a", "0123456789"].map(str::to_owned);
        let target = Target { namespace, name, uid };
        let error = runs.act(&target, Action::Cancel).await.unwrap_err().to_string();
        assert!(error.contains("trials/0.json"), "{error}");
        assert!(!record.join("request.json").exists());
        runs.act(&target, Action::Delete).await.unwrap();
        assert!(!record.exists());
    }
}
