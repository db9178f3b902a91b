//! The run's state to a checkpoint and back.

use burn::module::Module;
use stoker_api::contract::ReportEvent;

use super::hook;
use super::run::Run;
use super::state::RunState;
use crate::Result;
use crate::checkpoint::Parts;
use crate::record;

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Starts a save of the state now, which shares its tensors with the loop until a step makes new
    /// ones. Copying them to the host, writing, hashing and storing happen on other threads.
    pub(super) fn save(&mut self) -> Result<()> {
        if !self.session.has_storage() || self.saved == Some(self.state.batches) {
            return Ok(());
        }
        self.state.callbacks.clear();
        for callback in &self.callbacks {
            let name = callback.name();
            let state = callback.state().map_err(|error| format!("callback {name}: {error}"))?;
            self.state.callbacks.insert(name, state);
        }
        let model = record::snapshot(&*self.model);
        let (optimizers, tensors) = self.optimizers.snapshot();
        self.state.optimizers = optimizers;
        let gradients = self.state.keep(&*self.model, &self.gradients);
        let (state, metric) = (self.state.clone(), self.searched_metric()?);
        let make = move || -> Result<Parts> {
            let mut parts = Parts::new();
            parts.insert(record::MODEL.into(), model.into_bytes()?);
            tensors.write(&mut parts)?;
            state.write(gradients, &mut parts)?;
            Ok(parts)
        };
        let make = Box::new(move || make().map_err(|error| error.to_string()));
        self.session.save(self.state.batches, metric, make)?;
        self.saved = Some(self.state.batches);
        Ok(())
    }

    /// Takes on the newest whole checkpoint, if there is one, and says where training starts.
    pub(super) fn restore(&mut self) -> Result<()> {
        let restored = self.session.restore()?;
        let mut resumed_from = None;
        if let Some((name, manifest, parts)) = restored.checkpoint {
            self.take_on(&parts).map_err(|error| format!("checkpoint {name}: {error}"))?;
            self.session.terminal.say(&format!("goes on from checkpoint {name}"));
            self.session.restore_unsent(manifest.unsent);
            self.saved = Some(self.state.batches);
            resumed_from = Some(name);
        }
        for (name, why) in &restored.refused {
            self.session.terminal.say(&format!("checkpoint {name} is not used: {why}"));
        }
        let (batches_total, refused) = (self.granted, restored.refused);
        let started = ReportEvent::Started { resumed_from, batches_total, refused };
        self.session.post(self.state.batches, started);
        Ok(())
    }

    fn take_on(&mut self, parts: &Parts) -> Result<()> {
        let state = RunState::read(parts)?;
        let is = (self.state.samples, self.state.global_batch);
        let was = (state.samples, state.global_batch);
        if is != was {
            let text = format!(
                "it was trained on {} samples in global batches of {}, not on {} in {}: its position \
                 in the data means nothing here",
                was.0, was.1, is.0, is.1
            );
            return Err(text.into());
        }
        // The model comes first: the optimizers' state goes by the parameter ids that it brings.
        self.model.replace(|model| record::load_model(model, parts))?;
        let optimizers = std::mem::replace(&mut self.optimizers, crate::optim::Optimizers::none());
        self.optimizers = optimizers.restore(&state.optimizers, parts)?;
        self.gradients = state.pending(&*self.model, parts)?;
        let states = &state.callbacks;
        hook(&mut self.callbacks, &mut self.control, |callback, _| {
            let state = states.get(&callback.name()).filter(|state| !state.is_null());
            state.map_or(Ok(()), |state| callback.load_state(state.clone()))
        })?;
        self.state = state;
        Ok(())
    }
}
