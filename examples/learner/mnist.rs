//! A model of handwritten digits and its data, as in a plain burn program without Stoker.

use std::path::{Path, PathBuf};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

/// Result of the program. An error ends it.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Number of pixels of an image.
const NUM_PIXELS: usize = 28 * 28;

/// A multilayer perceptron with one hidden layer.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(NUM_PIXELS, 128).init(device),
            output: LinearConfig::new(128, 10).init(device),
        }
    }

    fn classify(&self, Digits { images, labels }: Digits) -> ClassificationOutput {
        let hidden = Relu.forward(self.hidden.forward(images));
        let output = self.output.forward(hidden);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        ClassificationOutput::new(loss.forward(output.clone(), labels.clone()), output, labels)
    }
}

impl TrainStep for Mlp {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, digits: Digits) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(digits);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Mlp {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, digits: Digits) -> ClassificationOutput {
        self.classify(digits)
    }
}

/// Images `[samples, 784]` and their digits `[samples]`.
#[derive(Clone, Debug)]
pub(crate) struct Digits {
    images: Tensor<2>,
    labels: Tensor<1, Int>,
}

/// An image and its digit.
pub(crate) type Digit = (Vec<u8>, u8);

/// Builds batches.
#[derive(Clone, Debug)]
pub(crate) struct DigitBatcher;

impl Batcher<Digit, Digits> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> Digits {
        let n = items.len();
        let pixels = items.iter().flat_map(|(image, _)| image);
        let pixels = pixels.map(|pixel| f32::from(*pixel) / 255.0);
        let images = TensorData::new(pixels.collect::<Vec<_>>(), [n, NUM_PIXELS]);
        let labels: Vec<i64> = items.iter().map(|(_, label)| i64::from(*label)).collect();
        Digits {
            images: Tensor::from_data(images, device),
            labels: Tensor::from_data(TensorData::new(labels, [n]), device),
        }
    }
}

/// Reads the digits of `train` or `t10k` from unpacked files in the directory `MNIST`. If `MNIST`
/// is unset, the directory is that of `scripts/fetch-data mnist`.
pub(crate) fn digits(part: &str) -> Result<InMemDataset<Digit>> {
    let folder = std::env::var_os("MNIST").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(&std::env::var_os("HOME").unwrap_or_default()).join(".cache/stoker/data/mnist")
    });
    // Skip the idx header: 16 bytes for images and 8 for labels.
    let read = |kind: &str, head: usize| -> Result<Vec<u8>> {
        let path = folder.join(format!("{part}-{kind}-ubyte"));
        let bytes = std::fs::read(&path);
        let bytes = bytes.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(bytes.get(head..).unwrap_or_default().to_vec())
    };
    let (images, labels) = (read("images-idx3", 16)?, read("labels-idx1", 8)?);
    let images = images.chunks_exact(NUM_PIXELS).map(<[u8]>::to_vec);
    Ok(InMemDataset::new(images.zip(labels).collect()))
}
