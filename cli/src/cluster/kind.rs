//! What experiments and inference jobs have in common: both are made from a file, go on until they end,
//! and are told what is wanted of them by one field.

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
pub(crate) trait Kind:
    kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
{
    /// What one is called.
    const WORD: &'static str;
    /// What those of its programs do that are asked to leave.
    const LEAVES: &'static str;

    /// Where it stands.
    fn phase(&self) -> Phase;
    /// What is wanted of it.
    fn state(&mut self) -> &mut DesiredState;
    /// The files that were sent with it.
    fn context(&mut self) -> &mut Option<CodeContext>;
    /// What it says of its storage.
    fn storage(&self) -> CheckpointStorage;
    /// How it is going, in one line.
    fn progress(&self) -> String;
    /// Prints its end; returns the exit code.
    fn tell(&self, cluster: &Cluster, output: Output) -> impl Future<Output = Result<u8, Failure>>;

    /// Its name.
    fn name(&self) -> String {
        self.meta().name.clone().unwrap_or_default()
    }
}

impl Kind for Experiment {
    const WORD: &'static str = "experiment";
    const LEAVES: &'static str = "its trials take a checkpoint and exit";

    fn phase(&self) -> Phase {
        self.status.as_ref().map(|it| it.phase).unwrap_or_default()
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

    async fn tell(&self, cluster: &Cluster, output: Output) -> Result<u8, Failure> {
        wait::tell(cluster, self, output).await
    }
}

impl Kind for InferenceJob {
    const WORD: &'static str = "job";
    const LEAVES: &'static str = "its workers exit after the batch that they are at";

    fn phase(&self) -> Phase {
        self.status.as_ref().map(|it| it.phase).unwrap_or_default()
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

    async fn tell(&self, _: &Cluster, output: Output) -> Result<u8, Failure> {
        job::tell(self, output);
        Ok(wait::code(self.phase()))
    }
}
