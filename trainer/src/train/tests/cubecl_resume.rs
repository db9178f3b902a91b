//! A resume on a GPU, or with feature `cubecl-cpu` on burn's backend for GPUs on a CPU, where it
//! does not tune kernels.
//!
//! The optimizer is fused. The operations of burn's optimizers run in other kernels in the first
//! steps of a process than later.

use std::process::Command;

use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::optim::AdamWConfig;
use stoker_kernels::{
    Activation, AttentionMask, EmbeddingExt as _, LinearExt as _, OptimizerConfigExt as _,
    TransformerEncoderExt as _,
};

use super::*;
use crate::Distributed;
use crate::device::gpu_tensor::tests::gpu;

/// In the processes that train: their directory, and the batch at which they end.
const FOLDER: &str = "STOKER_TEST_CUBECL_FOLDER";
const BATCHES: &str = "STOKER_TEST_CUBECL_BATCHES";
/// Number of tokens that a sequence has, and number of different tokens.
const LENGTH: usize = 8;
const VOCABULARY: usize = 16;

#[derive(Module, Debug)]
struct Transformer {
    tokens: Embedding,
    layers: TransformerEncoder,
    output: Linear,
}

fn transformer(device: &Device) -> Transformer {
    let layers = TransformerEncoderConfig::new(16, 32, 2, 1).with_dropout(0.0);
    Transformer {
        tokens: EmbeddingConfig::new(VOCABULARY, 16).init(device),
        layers: layers.with_norm_first(true).init(device),
        output: LinearConfig::new(16, VOCABULARY).init(device),
    }
}

/// Each token is predicted from the ones before it.
fn step(model: &Transformer, tokens: Tensor<2, Int>) -> StepOutput {
    let inputs = model.tokens.forward_fused(tokens.clone().narrow(1, 0, LENGTH));
    let encoded = model.layers.forward_fused(inputs, &AttentionMask::causal(), 1e-5);
    let logits = model.output.forward_fused(encoded, Activation::Identity);
    StepOutput::classification(logits.flatten(0, 1), tokens.narrow(1, 1, LENGTH).flatten(0, 1))
}

fn train(folder: &Path, batches: u64, device: Device) {
    let Context { config, io, stop, .. } = alone(Some(folder), batches).context().unwrap();
    let io = Arc::into_inner(io).unwrap().into_inner().unwrap();
    let device = device.autodiff();
    let context = Context::new(config, io, stop, device, Distributed::single_rank());
    let token = |sample: usize, position: usize| {
        (mix_seed(&[sample as u64, position as u64]) % VOCABULARY as u64) as i64
    };
    let sequence =
        move |sample: usize| Some((0..=LENGTH).map(|at| token(sample, at)).collect::<Vec<_>>());
    let batch = |sequences: Vec<Vec<i64>>, device: &Device| {
        let shape = [sequences.len(), LENGTH + 1];
        Tensor::<2, Int>::from_data(TensorData::new(sequences.concat(), shape), device)
    };
    let fit = Fit::new(Data::items(40, sequence, batch)).batch_size(8);
    let adam = Optimizers::one(AdamWConfig::new().init_fused(), 0.01).clip_norm(1.0);
    context.fit(transformer(context.device()), adam, step, fit).unwrap();
}

/// Each training runs in a separate process, so that it chooses again how to fuse operations.
#[test]
fn resumed_transformers_are_bit_identical_on_cubecl() {
    let _stream = lock_random_stream();
    let Some(device) = gpu() else { return };
    if let Ok(folder) = std::env::var(FOLDER) {
        return train(Path::new(&folder), std::env::var(BATCHES).unwrap().parse().unwrap(), device);
    }
    let folder = tempfile::tempdir().unwrap();
    let weights = |name: &str, lengths: &[u64]| {
        let folder = folder.path().join(name);
        for batches in lengths {
            let test =
                "train::tests::cubecl_resume::resumed_transformers_are_bit_identical_on_cubecl";
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test])
                .env(FOLDER, &folder)
                .env(BATCHES, batches.to_string())
                .status();
            assert!(status.unwrap().success(), "{name}, {batches} batches");
        }
        let mut files = last_checkpoint(&folder);
        files.retain(|name, _| name.ends_with(".bpk"));
        files
    };
    let (straight, resumed) = (weights("straight", &[20]), weights("resumed", &[11, 20]));
    let names: Vec<_> = straight.keys().collect();
    assert_eq!(names, ["model.bpk", "optimizers.bpk"]);
    assert!(straight == resumed, "the resumed training differs");
}
