//! Schema parts that types cannot express.

/// CEL rule: no field except `state` has changed.
pub(crate) const UNCHANGED_RULE: &str = "self.entrypoint == oldSelf.entrypoint && \
    self.searcher == oldSelf.searcher && \
    self.resources == oldSelf.resources && \
    self.checkpointStorage == oldSelf.checkpointStorage && \
    self.checkpointPolicy == oldSelf.checkpointPolicy && \
    self.performInitialValidation == oldSelf.performInitialValidation && \
    self.recordsPerEpoch == oldSelf.recordsPerEpoch && \
    self.schedulingUnit == oldSelf.schedulingUnit && \
    self.maxRestarts == oldSelf.maxRestarts && \
    self.preemptionTimeoutSeconds == oldSelf.preemptionTimeoutSeconds && \
    self.reproducibility == oldSelf.reproducibility && \
    self.optimizations == oldSelf.optimizations && \
    self.pod == oldSelf.pod && \
    self.data == oldSelf.data && \
    self.hyperparameters == oldSelf.hyperparameters && \
    has(self.description) == has(oldSelf.description) && \
    (!has(self.description) || self.description == oldSelf.description) && \
    has(self.labels) == has(oldSelf.labels) && \
    (!has(self.labels) || self.labels == oldSelf.labels) && \
    has(self.env) == has(oldSelf.env) && \
    (!has(self.env) || self.env == oldSelf.env) && \
    has(self.minValidationPeriod) == has(oldSelf.minValidationPeriod) && \
    (!has(self.minValidationPeriod) || self.minValidationPeriod == oldSelf.minValidationPeriod) && \
    has(self.minCheckpointPeriod) == has(oldSelf.minCheckpointPeriod) && \
    (!has(self.minCheckpointPeriod) || self.minCheckpointPeriod == oldSelf.minCheckpointPeriod) && \
    has(self.context) == has(oldSelf.context) && \
    (!has(self.context) || self.context == oldSelf.context) && \
    has(self.podOverrides) == has(oldSelf.podOverrides) && \
    (!has(self.podOverrides) || self.podOverrides == oldSelf.podOverrides)";
/// The name rule of `crate::validate` in CEL.
pub(crate) const NAME_RULE: &str = "self.metadata.name.size() <= 40 && \
                                    self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')";
/// Message of [`NAME_RULE`].
pub(crate) const NAME_MESSAGE: &str = "metadata.name must be at most 40 lower-case letters, \
    digits and `-`, begin with a letter and not end with `-`";

/// An object of any shape: Kubernetes keeps all of its fields.
pub(crate) fn free_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// A list of objects of any shape.
pub(crate) fn free_objects(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true }
    })
}
