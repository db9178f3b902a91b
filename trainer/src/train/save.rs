//! Saves the run's state to checkpoints, and restores it.

use burn::module::Module;
use bytes::Bytes;
use stoker_api::contract::ReportEvent;

use super::best_weights::BEST_WEIGHTS;
use super::run::Run;
use super::state::{PendingTensors, RunState};
use super::{CallbackError, call_hook, call_hook_with_index, catch_panic, unique_names};
use crate::callback::CheckpointFiles;
use crate::checkpoint::{CheckpointContents, FileParts, NewContents};
use crate::error::with_sources;
use crate::{Error, InvalidHyperparameters, Result, device, precision, record};

/// Error when restoring from a complete checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint {name}: {source}")]
pub(super) struct RestoreError {
    pub(super) name: String,
    pub(super) source: Error,
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Starts a save of the current state. On a CPU, the save shares tensors with the loop until a
    /// step replaces them. On a GPU, it copies them to the host first, because the next step would
    /// otherwise need memory for a second model and optimizer. Hashing and storing run on other
    /// threads.
    pub(super) fn save(&mut self) -> Result<()> {
        if !self.io().has_storage() || self.saved == Some(self.state.batches) {
            return Ok(());
        }
        self.read_late_metrics()?;
        let mut files = CheckpointFiles::default();
        let ranks = self.context.distributed();
        self.update_control();
        call_hook(&mut self.callbacks, &mut self.control, ranks, |callback, control| {
            callback.on_checkpoint(&mut files, control)
        })?;
        // Save the checkpoint as if training continued, and apply the stop in the next hook, also
        // if that hook runs in a process that resumes from this checkpoint.
        let stop = self.control.stop.take();
        self.apply_control()?;
        self.state.pending_stop.clone_from(&stop);
        self.control.stop = stop;
        let files = files.into_files();
        self.state.callbacks.clear();
        for (callback, name) in self.callbacks.iter().zip(unique_names(&self.callbacks)) {
            if callback.chief_only() && ranks.rank() > 0 {
                continue;
            }
            match catch_panic(|| callback.state()) {
                Ok(state) => self.state.callbacks.insert(name, state),
                Err(source) => return Err(CallbackError { name, source }.into()),
            };
        }
        let precision = self.context.config.mixed_precision;
        self.model.replace(|model| Ok(precision::to_single_statistics(model, precision)))?;
        let gradients = self.state.record_pending(&*self.model, &self.gradients)?;
        let others = self.gather_pending(&gradients)?;
        let buffers = self.gather_buffers()?;
        let metric = self.searched_metric()?;
        if !self.io().is_lead() {
            self.saved = Some(self.state.batches);
            return Ok(());
        }
        let model = record::snapshot(&*self.model);
        let (optimizers, tensors) =
            self.optimizers.snapshot(device::is_host(self.context.device()));
        self.state.optimizers = optimizers;
        let state = self.state.clone();
        let best_weights = self.best_weights.clone();
        let make = move || -> Result<NewContents> {
            let files = files.into_iter().map(|(name, bytes)| (name, bytes.into()));
            let mut contents: NewContents = files.collect();
            contents.extend(best_weights.map(|model| (BEST_WEIGHTS.into(), model.into())));
            contents.insert(record::MODEL.into(), model.into_file()?);
            contents.extend(buffers);
            tensors.write(&mut contents)?;
            state.write(gradients, others, &mut contents)?;
            Ok(contents)
        };
        let make = Box::new(move || make().map_err(|error| error.to_string()));
        self.wait_for(|run| run.io().save(run.state.batches, metric, make))?;
        self.saved = Some(self.state.batches);
        Ok(())
    }

    /// Gathers the other ranks' pending gradient sums on rank 0; the checkpoint needs them too.
    fn gather_pending(&mut self, local: &PendingTensors) -> Result<Vec<Bytes>> {
        let ranks = self.context.distributed();
        if ranks.size() == 1 {
            self.state.other_ranks.clear();
            return Ok(vec![]);
        }
        let of_ranks = self
            .all_gather_with_stop("save", (self.state.num_gradients.clone(), self.state.count))?;
        self.state.other_ranks = of_ranks[1..].to_vec();
        if of_ranks.iter().all(|(num_gradients, _)| num_gradients.is_empty()) {
            return Ok(vec![]);
        }
        let local = if ranks.rank() == 0 { Bytes::new() } else { RunState::pack(local.clone())? };
        let mut all = ranks.collective().gather_to_root(local)?;
        Ok(if self.io().is_lead() { all.split_off(1) } else { vec![] })
    }

    /// Gathers the buffers of ranks 1, 2, ... on rank 0, because a step may read them. Returns the
    /// files of buffers that differ from those of rank 0. After a validation, none do.
    fn gather_buffers(&self) -> Result<Vec<(String, FileParts)>> {
        let ranks = self.context.distributed();
        if ranks.size() == 1 {
            return Ok(vec![]);
        }
        let local = record::buffers(&*self.model)?;
        if local.is_empty() {
            return Ok(vec![]);
        }
        let all = ranks.collective().gather_to_root(local.clone())?;
        if !self.io().is_lead() {
            return Ok(vec![]);
        }
        let others = (0..).zip(all).filter(|(_, bytes)| *bytes != local);
        Ok(others.map(|(rank, bytes)| (buffers_file(rank), bytes.into())).collect())
    }

    /// Copies rank 0's buffers, such as BatchNorm's statistics, to all ranks.
    pub(super) fn broadcast_buffers(&mut self) -> Result<()> {
        let ranks = self.context.distributed();
        if ranks.size() == 1 {
            return Ok(());
        }
        self.model.replace(|model| record::broadcast_buffers(model, ranks.collective()))?;
        #[cfg(feature = "learner")]
        self.optimizers.set_model(&*self.model);
        Ok(())
    }

    /// Restores the newest complete checkpoint, if there is one, and reports where training starts.
    pub(super) fn restore(&mut self) -> Result<()> {
        let restored = self.restore_on_all_ranks()?;
        let source = restored.chosen.as_ref().and_then(|chosen| chosen.trial_path.clone());
        let mut resumed_from = None;
        if let Some((name, manifest, contents)) = restored.checkpoint {
            let restore_error = |source| RestoreError { name: name.clone(), source };
            let message = match self.is_same_training(&contents).map_err(restore_error)? {
                true => {
                    self.restore_from(&contents, source.is_some()).map_err(restore_error)?;
                    self.saved = Some(self.state.batches);
                    match &source {
                        Some(path) => format!("starts as a copy of checkpoint {name} of {path}"),
                        None => format!("resumed from checkpoint {name}"),
                    }
                }
                false => {
                    let load = |model| record::load_model(model, &contents);
                    // Without the optimizers' state, the IDs of the checkpoint are not needed.
                    self.model
                        .replace(|model| Ok(record::initialize(record::with_new_ids(load(model)?))))
                        .map_err(restore_error)?;
                    (self.state.base, self.state.batches) = (manifest.batches, 0);
                    let id = &self.state.continue_id;
                    format!("training {id:?} starts with the weights of checkpoint {name}")
                }
            };
            self.io().base = self.state.base;
            self.io().terminal.print_line(&message);
            // The reports of a copy's source are not about this trial.
            if source.is_none() {
                self.io().restore_unsent(manifest.unsent);
            }
            resumed_from = Some(name);
        }
        self.io().report_unreported(&restored.refused);
        let batches = self.state.base + self.state.batches;
        self.io().record_resume(resumed_from.clone(), batches);
        for (name, why) in &restored.refused {
            self.io().terminal.print_line(&format!("checkpoint {name} is not used: {why}"));
        }
        let (batches_total, refused) = (self.state.base + self.granted, restored.refused);
        let started = ReportEvent::Started { resumed_from, batches_total, refused };
        self.io().post(self.state.batches, started);
        Ok(())
    }

    /// Returns whether a checkpoint belongs to this training, not to another one of the trial.
    fn is_same_training(&self, contents: &CheckpointContents) -> Result<bool> {
        Ok(RunState::read(contents)?.continue_id == self.state.continue_id)
    }

    /// Restores all state from a checkpoint. A copy takes that of another trial, with other
    /// hyperparameters: it has its own order of data and random numbers from there on.
    pub(super) fn restore_from(
        &mut self,
        contents: &CheckpointContents,
        is_copy: bool,
    ) -> Result<()> {
        let mut state = RunState::read(contents)?;
        let is = (self.state.samples, self.state.global_batch);
        let was = (state.samples, state.global_batch);
        if is_copy {
            self.check_copy(was)?;
            (state.order, state.stopped) = (self.state.order.clone(), None);
            (state.pending_stop, state.is_validation_due) = (None, false);
        } else if is != was {
            let text = format!(
                "it was trained on {} samples in global batches of {}, not on {} in {}; use the \
                 same data and batch size, or another `Fit::continue_id` to take only its weights",
                was.0, was.1, is.0, is.1
            );
            return Err(text.into());
        }
        match (&state.order, &self.state.order) {
            (Some(was), Some(is)) if was != is => {
                let text = format!(
                    "it was trained with {was}, not with {is}; use the same settings, or another \
                     `Fit::continue_id` to take only its weights"
                );
                return Err(text.into());
            }
            _ => {}
        }
        // Load the model first: the optimizers' state refers to its parameter ids.
        let fits = |error: Error| if is_copy { unfit_source(&*error) } else { error };
        self.load_weights(contents, state.other_ranks.len() + 1).map_err(fits)?;
        let optimizers = std::mem::replace(&mut self.optimizers, crate::optim::Optimizers::none());
        self.optimizers = optimizers.restore(&state.optimizers, contents).map_err(fits)?;
        let ranks = self.context.distributed();
        self.gradients = state.pending(&*self.model, contents, ranks.rank(), ranks.size())?;
        let files = CheckpointFiles::from_contents(contents);
        let states = &state.callbacks;
        let names = unique_names(&self.callbacks);
        let unused =
            states.iter().filter(|(name, state)| !state.is_null() && !names.contains(name));
        for (name, _) in unused.filter(|_| ranks.rank() == 0) {
            eprintln!("stoker: the checkpoint has the state of a callback {name} that is not used");
        }
        call_hook_with_index(
            &mut self.callbacks,
            &mut self.control,
            ranks,
            |index, callback, _| {
                let state = states.get(&names[index]).filter(|state| !state.is_null());
                state.map_or(Ok(()), |state| callback.load_state(state.clone()))?;
                callback.on_restore(&files)
            },
        )?;
        self.state = state;
        // A slice would keep all files of the checkpoint in memory.
        let copy = |bytes: &Bytes| Bytes::copy_from_slice(bytes);
        self.best_weights = contents.get(BEST_WEIGHTS).map(copy);
        Ok(())
    }

    /// Loads the weights of a checkpoint, and the buffers of this rank if as many ranks saved it.
    fn load_weights(&mut self, contents: &CheckpointContents, num_saved: usize) -> Result<()> {
        let ranks = self.context.distributed();
        let local = contents.get(&buffers_file(ranks.rank()));
        let local = local.filter(|_| num_saved == ranks.size());
        self.model.replace(|model| {
            let model = record::load_model(model, contents)?;
            match local {
                Some(bytes) => record::with_buffers(model, bytes),
                None => Ok(model),
            }
        })?;
        // The loaded IDs are those of the program that saved the checkpoint.
        record::check_clones(&*self.model).map_err(|error| {
            let text = format!(
                "it was saved by a program with clones: {error}; use another `Fit::continue_id` \
                 to take only its weights"
            );
            text.into()
        })
    }

    /// Fails if the trained length of a copy would not be that of its source.
    fn check_copy(&self, (samples, global_batch): (usize, usize)) -> Result<()> {
        let is = (self.state.samples, self.state.global_batch);
        if is == (samples, global_batch) {
            return Ok(());
        }
        let text = format!(
            "the source of this copy was trained on {samples} samples in global batches of \
             {global_batch}, not on {} in {}; keep the data and the batch size constant in a \
             search that copies trials",
            is.0, is.1
        );
        Err(InvalidHyperparameters(text).into())
    }
}

/// Returns the file name of another rank's buffers.
fn buffers_file(rank: usize) -> String {
    format!("buffers-{rank}.bin")
}

/// Returns the error of a copy whose hyperparameters do not fit the state of its source. The search
/// samples others.
fn unfit_source(error: &(dyn std::error::Error + 'static)) -> Error {
    let text = format!(
        "the state of the source does not fit this copy: {}; keep hyperparameters that change \
         the model or the optimizer's state constant in a search that copies trials",
        with_sources(error)
    );
    InvalidHyperparameters(text).into()
}
