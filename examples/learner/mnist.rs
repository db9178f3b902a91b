//! A model of handwritten digits and its data, as a program of burn's has them.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use stoker_trainer::datasets::{Cache, idx};

/// Pixels of an image.
const NUM_PIXELS: usize = 28 * 28;

/// A perceptron of one hidden layer.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    hidden: Linear,
    dropout: Dropout,
    output: Linear,
}

impl Mlp {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(NUM_PIXELS, 128).init(device),
            dropout: DropoutConfig::new(0.2).init(),
            output: LinearConfig::new(128, 10).init(device),
        }
    }

    fn classify(&self, Digits { images, labels }: Digits) -> ClassificationOutput {
        let hidden = Relu.forward(self.hidden.forward(images));
        let output = self.output.forward(self.dropout.forward(hidden));
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

/// Makes batches.
#[derive(Clone, Debug)]
pub(crate) struct DigitBatcher;

impl Batcher<Digit, Digits> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> Digits {
        let n = items.len();
        let pixels = items.iter().flat_map(|(image, _)| image).map(|it| f32::from(*it) / 255.0);
        let images = TensorData::new(pixels.collect::<Vec<_>>(), [n, NUM_PIXELS]);
        let labels: Vec<i64> = items.iter().map(|(_, label)| i64::from(*label)).collect();
        Digits {
            images: Tensor::from_data(images, device),
            labels: Tensor::from_data(TensorData::new(labels, [n]), device),
        }
    }
}

/// The digits of `train` or `t10k`, as `scripts/fetch-data mnist` leaves them.
pub(crate) fn digits(part: &str) -> stoker_trainer::Result<InMemDataset<Digit>> {
    let folder = Cache::standard()?.folder().join("mnist");
    let read = |kind: &str, dimensions: usize| {
        idx::read(Path::new(&folder).join(format!("{part}-{kind}-ubyte")), dimensions)
    };
    let (images, labels) = (read("images-idx3", 3)?, read("labels-idx1", 1)?);
    let images = images.values.chunks_exact(NUM_PIXELS).map(<[u8]>::to_vec);
    Ok(InMemDataset::new(images.zip(labels.values).collect()))
}
