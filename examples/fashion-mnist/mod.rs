//! Fashion-MNIST: clothing items in the format of MNIST, with the same models.

use burn::tensor::Device;
use stoker_trainer::{Context, Data, Optimizers, Result, StepOutput, Trial};

use crate::data_config::DataConfig;
use crate::mnist::{Batch, Hparams, Network, images};

/// The trial.
#[derive(Debug)]
pub(crate) struct FashionMnist {
    hparams: Hparams,
    data: DataConfig,
}

impl Trial for FashionMnist {
    type Model = Network;
    type Batch = Batch;

    fn new(context: &Context) -> Result<Self> {
        Ok(Self {
            hparams: Hparams::new(context)?,
            data: DataConfig::new(context, "fashion-mnist")?,
        })
    }

    fn build_model(&self, device: &Device) -> Result<Network> {
        Ok(self.hparams.network(device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(self.hparams.optimizers())
    }

    fn build_training_data(&self) -> Result<Data<Batch>> {
        Ok(Data::new(images(&self.data, "train")?.normalized(&[0.286], &[0.353])?).workers(1))
    }

    fn build_validation_data(&self) -> Result<Data<Batch>> {
        Ok(Data::new(images(&self.data, "t10k")?.normalized(&[0.286], &[0.353])?))
    }

    fn step(&self, model: &Network, (images, classes): Batch) -> StepOutput {
        StepOutput::classification(model.forward(images), classes)
    }
}
