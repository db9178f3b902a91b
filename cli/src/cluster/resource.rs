//! Common interface of experiments and inference jobs: both are created from a file, run until they
//! end and have a desired state.

use std::fmt::Debug;

use kube::core::NamespaceResourceScope;
use serde::Serialize;
use serde::de::DeserializeOwned;
use stoker_api::experiment::{CheckpointStorage, CodeContext, DesiredState, Experiment, Phase};
use stoker_api::inference::InferenceJob;

use super::connect::Cluster;
use super::{job, wait};
use crate::failure::Failure;
use crate::print::Output;

/// An experiment or a job.
pub(crate) trait ClusterResource:
    kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
{
    /// Name of the kind in messages and commands.
    const KIND_NAME: &'static str;
    /// Command that runs it locally.
    const RUN_COMMAND: &'static str;
    /// Effect of a pause or a cancellation on its processes.
    const STOP_EFFECT: &'static str;

    /// Returns the phase of the status.
    fn phase(&self) -> Phase;
    /// Returns the desired state of the spec.
    fn state(&mut self) -> &mut DesiredState;
    /// Returns the reference to the uploaded files in the spec.
    fn context(&mut self) -> &mut Option<CodeContext>;
    /// Returns the storage of the spec.
    fn storage(&self) -> CheckpointStorage;
    /// Returns the progress as one line.
    fn progress(&self) -> String;
    /// Prints the outcome and returns the exit code.
    fn print_outcome(
        &self,
        cluster: &Cluster,
        output: Output,
    ) -> impl Future<Output = Result<u8, Failure>>;

    /// Returns the object's name.
    fn name(&self) -> String {
        self.meta().name.clone().unwrap_or_default()
    }
}

impl ClusterResource for Experiment {
    const KIND_NAME: &'static str = "experiment";
    const RUN_COMMAND: &'static str = "stoker run FILE";
    const STOP_EFFECT: &'static str = "its trials checkpoint and exit";

    fn phase(&self) -> Phase {
        self.status.as_ref().map(|status| status.phase).unwrap_or_default()
    }

    fn state(&mut self) -> &mut DesiredState {
        &mut self.spec.state
    }

    fn context(&mut self) -> &mut Option<CodeContext> {
        &mut self.spec.context
    }

    fn storage(&self) -> CheckpointStorage {
        self.spec.checkpoint_storage.clone()
    }

    fn progress(&self) -> String {
        wait::progress(&self.name(), &self.status.clone().unwrap_or_default())
    }

    async fn print_outcome(&self, cluster: &Cluster, output: Output) -> Result<u8, Failure> {
        wait::print_outcome(cluster, self, output).await
    }
}

impl ClusterResource for InferenceJob {
    const KIND_NAME: &'static str = "job";
    const RUN_COMMAND: &'static str = "stoker job run FILE";
    const STOP_EFFECT: &'static str = "its workers exit after their current batch";

    fn phase(&self) -> Phase {
        self.status.as_ref().map(|status| status.phase).unwrap_or_default()
    }

    fn state(&mut self) -> &mut DesiredState {
        &mut self.spec.state
    }

    fn context(&mut self) -> &mut Option<CodeContext> {
        &mut self.spec.context
    }

    fn storage(&self) -> CheckpointStorage {
        let storage = self.spec.storage.clone();
        CheckpointStorage {
            url: storage.url,
            endpoint: storage.endpoint,
            secret_name: storage.secret_name,
            ..CheckpointStorage::default()
        }
    }

    fn progress(&self) -> String {
        job::progress(self)
    }

    async fn print_outcome(&self, _: &Cluster, output: Output) -> Result<u8, Failure> {
        job::print_outcome(self, output);
        Ok(wait::exit_code(self.phase()))
    }
}
